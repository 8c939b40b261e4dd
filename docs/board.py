"""The page docs/board.md, from what `make board` found under each torch, docs/board/TORCH.json."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOUND = ROOT / "docs" / "board"

PAGE = """\
# Compatibility board

<!-- written by docs/generate.py from docs/board/: run `make board` -->

This page lists every plugin of this repository, of its examples, and of the packages that
[a list](board/third-parties.toml) names, with what [its conformance suite](testing.md) found. To add a package of
yours, add it to the list; `make third-parties` tests all of them against a checkout.

- **Tests**: how many tests of its contract passed, were refused by the plugin with one sentence, were skipped, or
  failed, under the newest torch that it was run with.
- **Beside it**: under both strategies, 4 ranks compute what one process computes, or one of the two refuses. A pair
  that is in neither list needs more ranks.
- **torch**: the versions under which its suite ran; of one without a suite, under which it could be imported.

## Strategies

{strategies}

## Models and optimizers with a suite

{graded}

## Other plugins

Their packages have tests of their own, but no grade: no suite asks what their kind owes.

{others}
"""

Row = Mapping[str, Any]


def versions_of(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def records(folder: Path = FOUND) -> list[dict[str, Any]]:
    """One per torch, the newest last: {"torch": version, "plugins": rows}."""
    return sorted(
        (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")),
        key=lambda r: versions_of(r["torch"]),
    )


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def board(found: list[dict[str, Any]]) -> str:
    newest: dict[tuple[str, str], Row] = {}
    ran: dict[tuple[str, str], list[str]] = {}
    for record in found:
        for row in record["plugins"]:
            key = (row["kind"], row["name"])
            newest[key] = row
            ran.setdefault(key, []).append(_under(record["torch"], row))
    strategies, graded, others = [], [], []
    for key, row in sorted(newest.items()):
        torch = ", ".join(ran[key])
        if row["kind"] == "strategy":
            strategies.append([*_named(row), str(row["api"]), _tests(row), *_beside(row), torch])
        elif row["grade"]:
            graded.append([row["kind"], *_named(row), _tests(row), torch])
        else:
            others.append([row["kind"], *_named(row), torch])
    return PAGE.format(
        strategies=table(
            ["strategy", "package", "hook API", "tests", "beside it", "refused beside it", "torch"], strategies
        ),
        graded=table(["kind", "name", "package", "tests", "torch"], graded),
        others=table(["kind", "name", "package", "torch"], others),
    )


def _named(row: Row) -> list[str]:
    source = row.get("source", "")
    package = f"[{row['distribution']}]({source})" if source.startswith("http") else row["distribution"]
    return [f"`{row['name']}`", f"{package} {row['version']}"]


def _tests(row: Row) -> str:
    if not row["grade"]:
        return row["state"] if row["state"] != "ok" else "not run"
    return ", ".join(f"{count} {outcome}" for outcome, count in row["grade"]["counts"].items() if count)


def _beside(row: Row) -> list[str]:
    beside = (row["grade"] or {}).get("beside", {})
    by_outcome = {outcome: [f"`{name}`" for name in beside if beside[name] == outcome] for outcome in beside.values()}
    failed = [f"{name} (fails)" for name in by_outcome.get("failed", [])]
    return [", ".join(by_outcome.get("passed", []) + failed) or "-", ", ".join(by_outcome.get("refused", [])) or "-"]


def _under(torch: str, row: Row) -> str:
    failed = row["grade"]["counts"]["failed"] if row["grade"] else row["state"] != "ok"
    return f"{torch} (fails)" if failed else torch
