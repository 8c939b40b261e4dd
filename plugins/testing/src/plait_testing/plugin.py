"""The pytest plugin: ranks for the suites, a folder to start `plait` in, and a grade at the end.

Does nothing, and imports no torch, until used.
"""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plait_testing.grade import grades, lines, properties, write

if TYPE_CHECKING:
    from plait_testing.pool import Pool
    from plait_testing.project import Project


# Of an editable install pytest does not know the files, and would leave out what their asserts compare.
with_asserts = ("errors", "model_suite", "optimizer_suite", "parity", "suite")
pytest.register_assert_rewrite(*(f"plait_testing.{name}" for name in with_asserts))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("plait", "conformance of parallel training strategies")
    group.addoption("--plait-backend", default="gloo", choices=("gloo", "nccl"), help="what ranks talk by")
    group.addoption("--plait-timeout", default=120.0, type=float, help="seconds until ranks count as hung (120)")
    group.addoption("--plait-grade", metavar="FOLDER", help="writes NAME.json, for a badge, and NAME.suite.json")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: of a suite, what takes long and has a like; leave out with -m 'not slow'")


def pytest_itemcollected(item: pytest.Item) -> None:
    """A quick run tests only the last of a strategy's layouts, and leaves out what the suite calls slow."""
    suite = getattr(item, "cls", None)
    if not (layouts := getattr(suite, "layouts", None)):
        return
    layout = item.callspec.params.get("layout") if hasattr(item, "callspec") else None
    left = item.name.startswith(getattr(suite, "slow", ())) and not item.name.startswith(getattr(suite, "quick", ()))
    if left or layout not in (None, list(layouts)[-1]):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def plait_ranks(request: pytest.FixtureRequest) -> "Iterator[Pool]":
    """The one pool of 4 ranks of this session; starts at its first use."""
    from plait_testing.pool import OF_SUITES, Pool

    backend, timeout = (request.config.getoption(f"--plait-{name}") for name in ("backend", "timeout"))
    pool = Pool(4, backend, timeout, preload=OF_SUITES)
    yield pool
    pool.close()


@pytest.fixture
def plait_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Project":
    """Starts `plait` in the folder `tmp_path`, which is the current one during the test."""
    from plait_testing.project import OF_RANKS, Project

    for name in OF_RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    except Exception as error:
        if type(error).__name__ == "TooFewDevices":
            pytest.skip(str(error))
        raise


def pytest_runtest_makereport(item: pytest.Item, call: Any) -> None:
    if told := properties(item):
        item.user_properties[:] = [each for each in item.user_properties if each[0] != "plait"] + [("plait", told)]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line per subject of a suite: how many tests of its contract passed, were refused by it, skipped or failed."""
    if not (found := grades(terminalreporter.stats)):
        return
    terminalreporter.section("conformance")
    for line in lines(found):
        terminalreporter.line(line)
    if folder := terminalreporter.config.getoption("--plait-grade"):
        write(found, Path(folder))
