"""What mutation testing found: a summary, and the table in docs/testing.md."""

import platform
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path

import yaml

from plait_mutation.draw import Mutant
from plait_mutation.judge import Verdict

MARK = "<!-- the table below is written by `make mutants` -->"
REASONS = Path(__file__).with_name("reasons.yaml")
Found = list[tuple[Mutant, Verdict]]


def reasons() -> dict[str, str]:
    """Mutant -> why no test notices it. What begins with "equivalent: " changes nothing that could be noticed."""
    return yaml.safe_load(REASONS.read_text()) or {}


def outcome(mutant: Mutant, verdict: Verdict, known: dict[str, str]) -> str:
    if verdict.caught:
        return "caught"
    return "equivalent" if known.get(mutant.name, "").startswith("equivalent: ") else "survived"


def summary(found: Found) -> str:
    known = reasons()
    counts = Counter(outcome(*one, known) for one in found)
    good = counts["caught"] + counts["equivalent"]
    share = f", {good / len(found):.1%} caught or equivalent" if found else ""
    return f"{len(found)} mutants: " + ", ".join(f"{n} {what}" for what, n in counts.items()) + share


def write(page: Path, found: Found, seed: int, commit: str) -> None:
    """Replace what follows the mark in the page."""
    known = reasons()
    rows = [(mutant, outcome(mutant, verdict, known)) for mutant, verdict in found]
    lines = [
        MARK,
        "",
        f"{date.today()}, seed {seed}, commit {commit}, torch {version('torch')}, Python {platform.python_version()}.",
        "",
        "| change | mutants | caught | equivalent | survived |",
        "|---|--:|--:|--:|--:|",
        *_counts(rows, lambda mutant: mutant.operator),
        "",
        "| part | mutants | caught | equivalent | survived |",
        "|---|--:|--:|--:|--:|",
        *_counts(rows, _part),
        "",
        "| not caught | why |",
        "|---|---|",
        *(f"| `{_cell(mutant.name)}` | {known.get(mutant.name, 'not looked at yet')} |"
          for mutant, what in rows if what != "caught"),
        "",
    ]  # fmt: skip
    page.write_text(page.read_text().split(MARK)[0] + "\n".join(lines))


def _counts(rows, of) -> list[str]:
    table: dict[str, Counter[str]] = {}
    for mutant, what in rows:
        table.setdefault(of(mutant), Counter())[what] += 1
    total = sum(table.values(), Counter[str]())
    shown = [*sorted(table.items()), ("**in all**", total)]
    return [f"| {name} | {c.total()} | {c['caught']} | {c['equivalent']} | {c['survived']} |" for name, c in shown]


def _part(mutant: Mutant) -> str:
    parts = Path(mutant.file).parts
    return "/".join(parts[:2] if parts[0] == "plugins" else parts[:3])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")
