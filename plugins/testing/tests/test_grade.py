"""What suites found is told in a line by subject, and written for a badge and for the board."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from plait_testing.grade import OUTCOMES, Grade, grades, lines, write


def report(name: str, other: str | None = None, untrained: tuple[str, ...] = (), reason: str | None = None) -> Any:
    told = {"name": name, "kind": "strategy", "other": other, "untrained": list(untrained)}
    longrepr = None if reason is None else ("test_a.py", 7, reason)
    return SimpleNamespace(user_properties=[("plait", told)], longrepr=longrepr)


OF_ANOTHER_TEST = SimpleNamespace(user_properties=[("plait", {})], longrepr=None)
NEVER = tuple(f"layers.{number}.w" for number in range(10))
STATS = {
    "passed": [report("mine", "fsdp2"), report("mine", untrained=NEVER[:6]), report("early"), OF_ANOTHER_TEST],
    "skipped": [report("mine", "ddp", reason="Skipped: refused: it shards"), report("mine", "pp", reason="no GPU")],
    "failed": [report("mine", "zero", untrained=NEVER[4:])],
    "error": [report("mine")],
    "warnings": [SimpleNamespace()],
}


@pytest.fixture
def found() -> dict[str, Grade]:
    return grades(STATS)


def test_each_subject_is_graded_by_its_own_tests(found):
    assert [*found] == ["early", "mine"]
    assert found["mine"].counts == {"passed": 2, "refused": 1, "skipped": 1, "failed": 2}, "an error is a failure"
    assert found["mine"].beside == {"fsdp2": "passed", "ddp": "refused", "pp": "skipped", "zero": "failed"}
    assert lines(found) == [
        "early: 1 passed",
        f"mine: never trained in these checks, so not checked: {', '.join(NEVER[:8])} and 2 more",
        "mine: 2 passed, 1 refused, 1 skipped, 2 failed",
    ]


def test_few_parameters_that_were_never_trained_are_all_named():
    told = lines(grades({"passed": [report("mine", untrained=NEVER[:8])]}))
    assert told[0] == f"mine: never trained in these checks, so not checked: {', '.join(NEVER[:8])}"


def test_what_is_written(found, tmp_path):
    write(found, tmp_path / "new" / "folder")
    said = {file.name: json.loads(file.read_text()) for file in (tmp_path / "new" / "folder").iterdir()}
    assert said.keys() == {"early.json", "early.suite.json", "mine.json", "mine.suite.json"}
    badge = {"schemaVersion": 1, "label": "plait"}
    assert said["early.json"] == {**badge, "message": "1 passed", "color": "brightgreen"}
    assert said["mine.json"] == {**badge, "message": found["mine"].told, "color": "red"}
    whole = said["mine.suite.json"]
    assert (whole["name"], whole["kind"]) == ("mine", "strategy")
    assert whole["counts"] == dict(zip(OUTCOMES, (2, 1, 1, 2), strict=True))
    assert [*whole["beside"]] == ["ddp", "fsdp2", "pp", "zero"]
    assert all(whole[each] for each in ("torch", "plait"))
