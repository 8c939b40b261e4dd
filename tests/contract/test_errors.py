"""What an error carries besides its sentence, and that it arrives whole in another process."""

import pickle

import pytest

from plait.checkpoint.store import NoneSound
from plait.contract.errors import PlaitError, misfit, near_miss, no_default, unknown_key
from plait.launch.no_restart import RunFailed
from plait.system.errors import DiskError, one_line, packed, unpacked
from plait.testing import is_about


def test_a_key_is_only_there_if_one_is_at_fault() -> None:
    error = PlaitError("the disk is full")
    assert (str(error), error.key, error.value, error.fits) == ("the disk is full", None, None, None)
    about = PlaitError("x=3 is odd").at("x", 3, range(2, 5, 2))
    assert (str(about), about.key, about.value, about.fits) == ("x=3 is odd", "x", 3, (2, 4))


def test_sentences_that_many_errors_share() -> None:
    assert str(unknown_key("a.dmi", ["dim", "n"])) == "unknown key a.dmi; available: dim, n; did you mean 'dim'?"
    assert str(unknown_key("a.x", ["dim", "n"])) == "unknown key a.x; available: dim, n"
    assert str(misfit("a.b", None, "a number")) == "a.b is null; it must be a number"
    assert str(misfit("a.b", "no", "true or false")) == "a.b is 'no'; it must be true or false"
    assert str(no_default("a.b")) == "a.b must be given; it has no default"
    is_about(unknown_key("a.dmi", ["dim"]), "a.dmi", None, ("dim",))
    is_about(misfit("a.b", None, "a number"), "a.b", None, "a number")


def test_near_miss() -> None:
    assert near_miss("dmi", ["dim", "n"]) == "; did you mean 'dim'?"
    assert near_miss("temp", ["dim", "temperature"]) == "; did you mean 'temperature'?", "its beginning"
    assert near_miss("xyz", ["dim", "n"]) == near_miss("te", ["temperature"]) == ""


@pytest.mark.parametrize("kind", [PlaitError, DiskError, NoneSound, RunFailed])
def test_it_survives_pickling(kind: type[PlaitError]) -> None:
    error = kind("x=3 is odd").at("x", 3, (2, 4))
    error.add_note("raised by a strategy")
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is kind
    assert one_line(there) == one_line(error) == "x=3 is odd (raised by a strategy)"
    assert (there.key, there.value, there.fits, there.exit_code) == ("x", 3, (2, 4), error.exit_code)


def test_a_fault_keeps_its_exit_code() -> None:
    assert pickle.loads(pickle.dumps(RunFailed("no memory", "memory"))).exit_code == 4


class Odd(PlaitError):
    """A third party's, which pickle cannot make again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def test_as_text_it_needs_neither_its_class_nor_picklable_parts() -> None:
    there = unpacked(packed(Odd("x", "is odd").at("x", {"a": object, 3: lambda: 4}, (2, 4))))
    assert type(there) is PlaitError
    assert (str(there), there.key, there.fits) == ("x is odd", "x", (2, 4))
    assert there.value["a"] == "<class 'object'>"
    assert unpacked(packed(PlaitError("no key"))).key is None
