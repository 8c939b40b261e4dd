"""What the campaign found: a line a scenario, a summary, and the page docs/reliability.md."""

import platform
import re
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path

import attrs

ALONE = "<!-- the table below is written by `make faults` -->"
SEVERAL = "<!-- the table below, of several machines, is written by `make faults` -->"


@attrs.frozen
class Result:
    """One scenario. planted: (fault, verdict); pending: faults without one, as the scenario ended in a defect."""

    number: int
    kind: str
    layout: str
    folder: Path
    planted: list[tuple[str, str]]
    pending: list[str]
    defect: str
    notes: list[str]
    seconds: float
    commit: str = ""

    @property
    def faults(self) -> list[tuple[str, str]]:
        lost = [(fault, "defect") for fault in (self.pending or [self.kind])] if self.defect else []
        return [*map(tuple, self.planted), *lost]  # type: ignore[list-item]

    def line(self, total: int) -> str:
        counts = Counter(verdict for _, verdict in self.faults)
        what = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "nothing planted"
        text = f"{total:5}  #{self.number} {self.kind} ({self.layout}): {what}, {self.seconds:.0f} s"
        if not self.defect:
            return text
        return f"{text}\n       {'; '.join(self.notes)}\n       DEFECT: {self.defect}"


def faults_of(results: list[Result]) -> int:
    return sum(len(result.faults) for result in results)


def counts_by_kind(results: list[Result]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for result in results:
        found.setdefault(result.kind, Counter()).update(verdict for _, verdict in result.faults)
    return dict(sorted(found.items()))


def summary(results: list[Result], seconds: float) -> str:
    by_kind = counts_by_kind(results)
    rows = [
        ("faults", "equal", "refused", "defect"),
        *((k, c["equal"], c["refused"], c["defect"]) for k, c in by_kind.items()),
    ]
    total = sum(by_kind.values(), Counter[str]())
    rows.append((f"{total.total()} in all", total["equal"], total["refused"], total["defect"]))
    lines = [f"{row[0]!s:<26} {row[1]!s:>7} {row[2]!s:>8} {row[3]!s:>7}" for row in rows]
    return "\n".join([*lines, f"{len(results)} scenarios in {seconds / 60:.1f} minutes"])


def _commits(results: list[Result]) -> str:
    names = list(dict.fromkeys(result.commit for result in results if result.commit))
    return f"commit{'s' * (len(names) > 1)} {', '.join(names)}, " if names else ""


def write_page(path: Path, results: list[Result], seed: int, seconds: float, mark: str = ALONE) -> None:
    """Replace what follows the mark in the page, up to the next mark, by today's figures."""
    by_kind = counts_by_kind(results)
    total = sum(by_kind.values(), Counter[str]())
    names = Counter(re.sub(r"\d+", "N", fault) for result in results for fault, _ in result.faults)
    rows = [f"| {kind} | {c.total()} | {c['equal']} | {c['refused']} | {c['defect']} |" for kind, c in by_kind.items()]
    lines = [
        mark,
        "",
        f"{date.today()}, seed {seed}, {_commits(results)}torch {version('torch')}, "
        f"Python {platform.python_version()}, {platform.system()}; {len(results)} scenarios, "
        f"{len(names)} different faults, {seconds / 60:.0f} minutes.",
        "",
        "| faults | planted | equal | refused | defects |",
        "|---|--:|--:|--:|--:|",
        *rows,
        f"| **in all** | **{total.total()}** | **{total['equal']}** | **{total['refused']}** | **{total['defect']}** |",
        "",
    ]
    text = path.read_text() if path.exists() else ""
    before, _, after = text.partition(mark)
    rest = after[after.index("<!--") :] if "<!--" in after else ""
    path.write_text(before + "\n".join(lines) + (f"\n{rest}" if rest else ""))
