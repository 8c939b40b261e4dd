"""What the suites found, by subject: a line at the end, and files for a badge and for the board of plugins."""

import json
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import attrs

OUTCOMES = ("passed", "refused", "skipped", "failed")
REFUSED = "refused: "  # how a skip's reason begins if the strategy itself refused
SUITES = {"suite": "strategy", "model_suite": "model", "optimizer_suite": "optimizer"}  # module -> what is tested
SHOWN = 8  # of the parameters that no check trained


@attrs.define
class Grade:
    """Outcomes of the tests of one subject's contract.

    counts:    outcome -> tests. beside: other strategy -> outcome of the test with it.
    untrained: the parameters that no check trained, in the order in which they were told.
    """

    kind: str
    counts: Counter[str] = attrs.Factory(Counter)
    beside: dict[str, str] = attrs.Factory(dict)
    untrained: dict[str, None] = attrs.Factory(dict)

    @property
    def told(self) -> str:
        return ", ".join(f"{self.counts[each]} {each}" for each in OUTCOMES if self.counts[each])


def tested(cls: type) -> tuple[str, str]:
    """The kind and the name of what a class of tests is about; ("", "") of a class that is no suite."""
    rooms = {base.__module__.removeprefix("plait_testing.").partition(".")[0] for base in cls.__mro__}
    for room, kind in SUITES.items():
        if room in rooms and (told := getattr(cls, kind, "")):
            return kind, told if isinstance(told, str) else _named(kind, str(told.get("_target_", "")))
    return "", ""


def _named(kind: str, target: str) -> str:
    """The name by which a config chooses it; of what no package has as a plugin, that of its class."""
    plugins = entry_points(group=f"plait.{kind}s")
    return next((each.name for each in plugins if each.value.replace(":", ".") == target), target.rpartition(".")[2])


def properties(item: Any) -> dict[str, Any]:
    """What a report must tell of a suite's test, so that it can be graded elsewhere; {} of another test."""
    kind, name = tested(getattr(item, "cls", None) or object)
    other = item.callspec.params.get("other") if hasattr(item, "callspec") else None
    never = list(getattr(getattr(item, "instance", None), "untrained", ()))
    return {"name": name, "kind": kind, "other": other, "untrained": never} if name else {}


def grades(stats: Mapping[str, list[Any]]) -> dict[str, Grade]:
    """By subject, from pytest's reports by outcome."""
    found: dict[str, Grade] = {}
    for outcome in ("passed", "skipped", "failed", "error"):
        for report in stats.get(outcome, []):
            if not (told := dict(getattr(report, "user_properties", ())).get("plait")):
                continue
            grade = found.setdefault(told["name"], Grade(told["kind"]))
            graded = outcome_of(outcome, report)
            grade.counts[graded] += 1
            grade.untrained |= dict.fromkeys(told["untrained"])
            if told["other"]:
                grade.beside[told["other"]] = graded
    return dict(sorted(found.items()))


def outcome_of(outcome: str, report: Any) -> str:
    if outcome == "skipped" and isinstance(report.longrepr, tuple | list) and REFUSED in report.longrepr[2]:
        return "refused"
    return "failed" if outcome == "error" else outcome


def lines(found: Mapping[str, Grade]) -> list[str]:
    said = []
    for name, grade in found.items():
        if never := list(grade.untrained):
            more = f" and {len(never) - SHOWN} more" if len(never) > SHOWN else ""
            said.append(f"{name}: never trained in these checks, so not checked: {', '.join(never[:SHOWN])}{more}")
        said.append(f"{name}: {grade.told}")
    return said


def write(found: Mapping[str, Grade], folder: Path) -> None:
    """NAME.json, from which shields.io draws a badge, and NAME.suite.json, from which `make board` makes its page."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, grade in found.items():
        badge = {"schemaVersion": 1, "label": "plait", "message": grade.told}
        badge["color"] = "red" if grade.counts["failed"] else "brightgreen"
        told = {
            "name": name,
            "kind": grade.kind,
            "torch": _version("torch"),
            "plait": _version("plait-core"),
            "counts": {each: grade.counts[each] for each in OUTCOMES},
            "beside": dict(sorted(grade.beside.items())),
        }
        for file, content in ((f"{name}.json", badge), (f"{name}.suite.json", told)):
            (folder / file).write_text(json.dumps(content) + "\n", encoding="utf-8")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
