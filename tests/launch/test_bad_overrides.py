"""300 overrides that cannot be meant: one sentence that names the key, exit code 1, and a disk as it was."""

import contextlib
import os
from pathlib import Path
from stat import S_ISDIR

import pytest

from tests.helpers.commands import plait as plait_command
from tests.launch.bad_overrides import NASTY, Bad, bad_cases, bad_overrides

FAST, ALL, REAL = 24, 300, 10
CPU = "launch.device=cpu"


@pytest.fixture(autouse=True)
def places(plait_project, tmp_path, monkeypatch):
    """All that a command may write to: the working folder, HOME, the cache, the temporary folder."""
    for name, variable in (("home", "HOME"), ("cache", "PLAIT_CACHE"), ("tmp", "TMPDIR")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Path -> size and time of change, of a folder only that it is there. The cache of torch's compiler is torch's."""
    found = [os.path.join(at, name) for at, folders, files in os.walk(folder) for name in (*folders, *files)]
    looks = {path: os.lstat(path) for path in found if "torchinductor_" not in path}
    return {path: (0, 0) if S_ISDIR(look.st_mode) else (look.st_size, look.st_mtime_ns) for path, look in looks.items()}


def started(*arguments):
    raise AssertionError("ranks would have been started")


def problem(plait_project, bad: Bad, places: Path) -> str:
    """What is wrong with how Plait refuses it; empty: nothing."""
    before = listing(places)
    done = None
    with contextlib.suppress(AssertionError):
        done = plait_project("train", CPU, *bad.arguments, ranks=started)
    if done is None:
        return "accepted"
    return said_wrong(bad, done.code, done.err) or (" it wrote" if listing(places) != before else "")


def said_wrong(bad: Bad, code: int, err: str) -> str:
    if code != 1:
        return f"exit code {code}"
    if not (err.startswith("plait: ") and err.count("\n") == 1 and err.endswith("\n")):
        return f"no one sentence: {err}"
    return "" if bad.key in err else f"does not name {bad.key}: {err}"


def raises_about(plait_project, cases: list[Bad], places: Path) -> None:
    found = {str(bad.arguments): why for bad in cases if (why := problem(plait_project, bad, places))}
    assert not found, f"{len(found)} of {len(cases)}: " + "\n".join(f"{what}: {why}" for what, why in found.items())


def test_a_part_of_them(plait_project, places):
    """The same ones each time; every kind is among them."""
    cases = bad_cases(0, ALL)
    raises_about(plait_project, cases[:: ALL // FAST], places)


@pytest.mark.slow
def test_all_of_them(plait_project, places):
    raises_about(plait_project, bad_cases(0, ALL), places)


@pytest.mark.slow
def test_commands(places):
    """Some as a user types them."""
    cases = [bad for bad in bad_cases(1, ALL)[:: ALL // REAL] if bad.arguments]
    before = listing(places)
    for bad in cases:
        done = plait_command("train", CPU, *bad.arguments, cwd=Path.cwd())
        assert not said_wrong(bad, done.code, done.err), bad
    assert listing(places) == before


def test_they_are_the_same_each_time():
    some = len(NASTY) + 20
    first = bad_overrides(3, some)
    bad_cases.cache_clear()
    assert first == bad_overrides(3, some) != bad_overrides(4, some)
    assert len({tuple(each) for each in bad_overrides(0, ALL)}) == ALL
