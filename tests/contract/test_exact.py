"""Types of a configuration, exactly: what fits is taken as the hint has it, what does not is refused in words."""

import enum
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
import pytest
import torch

from plait.contract.errors import in_yaml
from plait.contract.exact import Misfit, fitted, parameters_of
from plait.contract.schema import typed
from plait.testing import raises_about


class Colour(enum.Enum):
    red = 1
    blue = 2


class Odd:
    pass


FITS = [
    (3, int, 3),
    (3, float, 3.0),
    (math.inf, float, math.inf),
    (True, bool, True),
    ("x", str, "x"),
    (None, int | None, None),
    (3, float | int, 3),
    (3, int | str, 3),
    ([1, 2], list[int], [1, 2]),
    ([1, 2], tuple[int, ...], (1, 2)),
    ([1, "a"], tuple[int, str], (1, "a")),
    ({"a": 1}, dict[str, float], {"a": 1.0}),
    ("red", Colour, Colour.red),
    ("b", Literal["a", "b"], "b"),
    ("x", Path, Path("x")),
    (5, Any, 5),
    (5, Odd, 5),
    (0.5, float | torch.Tensor, 0.5),
    (2, Annotated[int, "steps"], 2),
    ([1], list, [1]),
]


@pytest.mark.parametrize(("value", "hint", "made"), FITS)
def test_fits(value, hint, made):
    found = fitted(value, hint)
    assert (found, type(found)) == (made, type(made))


MISFITS = [
    (True, int, "a whole number"),
    (True, float, "a number"),
    (1, bool, "true or false"),
    ("no", bool, "true or false"),
    (1.5, int, "a whole number"),
    (1e3, int, "a whole number, such as 1000"),
    (math.nan, float, "a number"),
    (2**63, int, "a whole number of 64 bits"),
    (10**400, float, "a number of 64 bits"),
    ("3", int, "a whole number"),
    ("3", float, "a number"),
    (3, str, "text (in quotes)"),
    (None, str, "text"),
    ([True], list[int], "a list in which each item is a whole number"),
    ([[1]], list[int], "a list in which each item is a whole number"),
    ([1], tuple[int, int], "a list of 2 values"),
    (3, list[int], "a list"),
    ("ab", list[str], "a list"),
    ([], dict[str, int], "a mapping from keys to values"),
    ({"a": "b"}, dict[str, int], "a whole number"),
    ("green", Colour, "red or blue"),
    ("c", Literal["a", "b"], "'a' or 'b'"),
    (1, Literal[True], "true"),
    ([], int | None, "a whole number or null"),
    ("x", float | torch.Tensor, "a number"),
    (True, int | str, "a whole number or text (in quotes)"),
]


@pytest.mark.parametrize(("value", "hint", "words"), MISFITS)
def test_misfits(value, hint, words):
    with pytest.raises(Misfit) as caught:
        fitted(value, hint)
    assert str(caught.value) == words


def test_shown_as_in_yaml():
    assert [in_yaml(value) for value in (True, None, "a\n", 1.0)] == ["true", "null", "'a\\n'", "1.0"]
    assert len(in_yaml("x" * 1000)) == 80


@attrs.define
class Inner:
    count: int = attrs.field(default=1, validator=attrs.validators.ge(1))


@attrs.define
class Outer:
    must: str
    inner: Inner = attrs.field(factory=Inner)
    perhaps: Inner | None = None
    _hidden: int = 3


def test_typed_nodes():
    assert typed(Outer, {"must": "x", "inner": {"count": 2}, "perhaps": {}}, "a") == Outer("x", Inner(2), Inner())
    assert typed(Outer, {"must": "x", "perhaps": None, "_hidden": 4}, "a") == Outer("x", hidden=4)


@pytest.mark.parametrize(
    ("values", "about"),
    [
        ({}, ("a.must",)),
        ({"must": "???"}, ("a.must",)),
        ({"must": "x", "inner": {"cuont": 2}}, ("a.inner.cuont", None, ("count",))),
        ({"must": "x", "inner": {"count": 0}}, ("a.inner.count", 0, ">= 1")),
        ({"must": "x", "perhaps": {"count": True}}, ("a.perhaps.count", True, "a whole number")),
        ({"must": "x", "inner": 3}, ("a.inner", 3, "a node with the keys count")),
    ],
)
def test_typed_refuses(values, about):
    with raises_about(*about):
        typed(Outer, values, "a")


def test_a_whole_config_lacks_nothing():
    with raises_about("a.inner"):
        typed(Outer, {"must": "x"}, "a", whole=True)


def test_what_a_function_takes():
    def plain(a: int, b: "NoSuchName" = 1): ...  # type: ignore[name-defined]  # noqa: F821

    assert parameters_of(plain)["a"].annotation in (int, "int")
    assert parameters_of(torch.optim.AdamW)["eps"].annotation is float
    assert parameters_of(dict) is None
