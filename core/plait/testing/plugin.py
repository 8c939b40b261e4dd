"""The pytest plugin: ranks for the suites, a folder to start `plait` in, and a grade at the end.

Does nothing, and imports no torch, until used.
"""

import json
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from plait.testing.pool import Pool
    from plait.testing.project import Project

SHOWN = 8  # of the parameters that no check trained
REFUSED = "refused: "  # how a skip's reason begins if the strategy itself refused
SUITES = {"suite": "strategy", "model_suite": "model", "optimizer_suite": "optimizer"}  # module -> what is tested


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("plait", "conformance of parallel training strategies")
    group.addoption("--plait-backend", default="gloo", choices=("gloo", "nccl"), help="what ranks talk by")
    group.addoption("--plait-timeout", default=120.0, type=float, help="seconds until ranks count as hung (120)")
    group.addoption("--plait-grade", metavar="FOLDER", help="writes each grade as NAME.json, for a badge")


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
    from plait.testing.pool import Pool

    pool = Pool(4, request.config.getoption("--plait-backend"), request.config.getoption("--plait-timeout"))
    yield pool
    pool.close()


@pytest.fixture
def plait_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Project":
    """Starts `plait` in the folder `tmp_path`, which is the current one during the test."""
    from plait.testing.project import OF_RANKS, Project

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
    subject = tested(getattr(item, "cls", None) or object)
    if subject and ("plait", subject) not in item.user_properties:
        item.user_properties.append(("plait", subject))
    names = getattr(getattr(item, "instance", None), "untrained", ()) if subject and call.when == "call" else ()
    if names:
        item.user_properties.append(("plait untrained", list(names)))


def tested(cls: type) -> str:
    """The name of the strategy or model that a class of tests is about, or of an optimizer's class; "" of another."""
    rooms = {base.__module__.removeprefix("plait.testing.").partition(".")[0] for base in cls.__mro__}
    told = next((getattr(cls, SUITES[room], "") for room in SUITES if room in rooms), "")
    return told if isinstance(told, str) else str(told.get("_target_", "")).rpartition(".")[2]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line per subject of a suite: how many tests of its contract passed, were refused by it, skipped or failed."""
    grades: dict[str, Counter[str]] = {}
    untrained: dict[str, dict[str, None]] = {}
    for outcome in ("passed", "skipped", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            name = dict(getattr(report, "user_properties", ())).get("plait")
            if name is not None:
                grades.setdefault(name, Counter())[_grade(outcome, report)] += 1
                never = dict(report.user_properties).get("plait untrained", ())
                untrained.setdefault(name, {}).update(dict.fromkeys(never))
    if not grades:
        return
    terminalreporter.section("conformance")
    for name, counts in sorted(grades.items()):
        parts = [f"{counts[kind]} {kind}" for kind in ("passed", "refused", "skipped", "failed") if counts[kind]]
        if never := untrained[name]:
            shown = f"{', '.join(list(never)[:SHOWN])}{f' and {len(never) - SHOWN} more' if len(never) > SHOWN else ''}"
            terminalreporter.line(f"{name}: never trained in these checks, so not checked: {shown}")
        terminalreporter.line(f"{name}: {', '.join(parts)}")
        if folder := terminalreporter.config.getoption("--plait-grade"):
            badge = {"schemaVersion": 1, "label": "plait", "message": ", ".join(parts)}
            badge["color"] = "red" if counts["failed"] else "brightgreen"
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, f"{name}.json").write_text(json.dumps(badge) + "\n", encoding="utf-8")


def _grade(outcome: str, report: Any) -> str:
    if outcome == "skipped" and isinstance(report.longrepr, tuple | list) and REFUSED in report.longrepr[2]:
        return "refused"
    return "failed" if outcome == "error" else outcome
