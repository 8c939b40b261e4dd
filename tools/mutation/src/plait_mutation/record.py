"""A pytest plugin that writes down which lines each test runs: in its process, in ranks, and in commands it starts.

    PLAIT_LINES=FOLDER python -m pytest -p plait_mutation.record ...

FOLDER gets a line per test in `tests-*.jsonl`, and a file per process that the tests start. What it has is not recorded
again, so a cut recording can be continued; tests of a file that was changed meanwhile are.
"""

import json
import os
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import coverage
import pytest

from plait_mutation.recorded import state_of

ROOT = Path(__file__).parents[4]
FOLDER = Path(os.environ.get("PLAIT_LINES", ""))
SOURCES = [f"{ROOT}/core/*", f"{ROOT}/plugins/*/src/*"]
Lines = dict[str, list[int]]


def measured() -> coverage.Coverage:
    return coverage.Coverage(data_file=None, config_file=False, include=SOURCES)


def lines_of(one: coverage.Coverage) -> Lines:
    data = one.get_data()
    return {str(Path(f).relative_to(ROOT)): sorted(data.lines(f) or ()) for f in data.measured_files()}


class Measured:
    """A function that also returns the lines that it runs, where a rank runs it; if it fails it writes them down."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.test = function, os.environ["PLAIT_TEST"]

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Lines]:
        os.environ.pop("PLAIT_TEST", None)  # the process itself is of no test: it serves many
        one = measured()
        one.start()
        try:
            answer = self.function(*args, **kwargs)
        except BaseException:
            one.stop()
            (FOLDER / f"{uuid.uuid4()}.json").write_text(json.dumps([self.test, lines_of(one)]))
            raise
        one.stop()
        return answer, lines_of(one)


class Recorder:
    def __init__(self) -> None:
        self.file = FOLDER / f"tests-{uuid.uuid4()}.jsonl"
        rows = (json.loads(line) for file in FOLDER.glob("tests-*.jsonl") for line in file.open())
        self.known = {name for name, *_, of in rows if of == state_of(name)}
        self.now: dict[str, set[int]] = {}
        self.result = ("", 0.0)
        self._inside_ranks()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if _plain(item.nodeid) not in self.known]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        name = _plain(item.nodeid)
        os.environ["PLAIT_TEST"] = name
        self.now, self.result = {}, ("passed", 0.0)
        one = measured()
        one.start()
        answer = yield
        one.stop()
        self._add(lines_of(one))
        lines = {file: sorted(found) for file, found in self.now.items()}
        with self.file.open("a") as file:
            file.write(json.dumps([name, *self.result, lines, state_of(name)]) + "\n")
        return answer

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome, seconds = self.result
        self.result = (outcome if report.passed else report.outcome, seconds + report.duration)

    def _add(self, lines: Lines) -> None:
        for file, found in lines.items():
            self.now.setdefault(file, set()).update(found)

    def _inside_ranks(self) -> None:
        from plait_testing.pool import Pool

        plain = Pool.run

        def run(pool: Pool, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
            answers = plain(pool, Measured(fn), *args, **kwargs)
            for _, lines in answers:
                self._add(lines)
            return [answer for answer, _ in answers]

        Pool.run = run  # type: ignore[method-assign, assignment] # it is called as the method is


def _plain(nodeid: str) -> str:
    """Without the group that pytest-xdist adds."""
    return nodeid.rsplit("@", 1)[0]


def pytest_configure(config: pytest.Config) -> None:
    if not os.environ.get("PLAIT_LINES"):
        return
    os.environ["PLAIT_SOURCES"] = os.pathsep.join(SOURCES)
    inject = str(Path(__file__).parent / "inject")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [inject, os.environ.get("PYTHONPATH")]))
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder(), "mutation-recorder")
