"""What `make gpu` found: a JSON file that grows part by part, and a table of it in Markdown beside it."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

Record = dict[str, Any]  # of a part: its figures, or "failed": why, or "skipped": why


@attrs.define
class Results:
    """The file `path`: {"about": ..., "parts": {name: record}}. Written anew after each part, whole or not at all."""

    path: Path
    about: dict[str, Any]
    parts: dict[str, Record] = attrs.Factory(dict)

    @classmethod
    def at(cls, path: Path, about: dict[str, Any]) -> "Results":
        """With the parts that an earlier command finished."""
        if not path.exists():
            return cls(path, about)
        kept = json.loads(path.read_text(encoding="utf-8"))
        return cls(path, kept["about"], kept["parts"])

    def add(self, name: str, record: Record) -> None:
        self.parts[name] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = {"about": self.about, "parts": self.parts}
        _replace(self.path, json.dumps(kept, indent=1) + "\n")
        _replace(self.path.with_suffix(".md"), table(self.about, self.parts))


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def table(about: dict[str, Any], parts: dict[str, Record]) -> str:
    """Markdown. Names of parts: MODEL/plait/N and MODEL/torchtitan/N are run N of a side, MODEL/WHAT a run of Plait's
    that differs from those by WHAT; the others are not trainings."""
    lines = [f"# {about['title']}", "", about["conditions"], ""]
    models = dict.fromkeys(name.split("/")[0] for name in parts if "/" in name)
    lines += _side_by_side(models, parts) + _variants(models, parts) + _others(parts)
    for kind, title in (("skipped", "Left out"), ("failed", "Failed")):
        if told := [f"- {name}: {record[kind]}" for name, record in parts.items() if kind in record]:
            lines += [f"## {title}", "", *told, ""]
    return "\n".join(lines)


def _ran(record: Record) -> bool:
    return "failed" not in record and "skipped" not in record


def _side_by_side(models: Iterable[str], parts: dict[str, Record]) -> list[str]:
    lines = [
        "## Beside torchtitan",
        "",
        "Tokens per second of each run; the ratio is that of their means.",
        "",
        "| model | batch | recomputed | Plait, tokens/s | MFU | GiB | torchtitan, tokens/s | MFU | GiB | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model in models:
        ours, theirs = (_runs(model, side, parts) for side in ("plait", "torchtitan"))
        if not ours and not theirs:
            continue
        first = (ours or theirs)[0]
        ratio = f"{_mean(ours) / _mean(theirs):.3f}" if ours and theirs else "-"
        cells = [model, first["batch"], first["recomputed"], *_cells(ours), *_cells(theirs), ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _runs(model: str, side: str, parts: dict[str, Record]) -> list[Record]:
    return [r for name, r in parts.items() if name.startswith(f"{model}/{side}/") and _ran(r)]


def _mean(runs: list[Record]) -> float:
    return sum(run["tokens_per_second"] for run in runs) / len(runs)


def _cells(runs: list[Record]) -> list[str]:
    """Tokens per second of each run, MFU of their mean, the most memory."""
    if not runs:
        return ["-", "-", "-"]
    rates = ", ".join(f"{run['tokens_per_second']:,.0f}" for run in runs)
    mfu = "-"
    if runs[0]["mfu"]:
        mfu = f"{runs[0]['mfu'] / runs[0]['tokens_per_second'] * _mean(runs):.1%}"
    return [rates, mfu, f"{max(run['peak_memory_bytes'] for run in runs) / 2**30:.1f}"]


def _variants(models: Iterable[str], parts: dict[str, Record]) -> list[str]:
    lines = []
    for model in models:
        base = _runs(model, "plait", parts)
        for name, record in parts.items():
            if name.count("/") == 1 and name.startswith(f"{model}/") and _ran(record):
                share = f"{record['tokens_per_second'] / _mean(base):.3f}" if base else "-"
                still = ", ".join(f"{s:.2f}" for s in record.get("stand_still_seconds", {}).values()) or "-"
                lines.append(f"| {model} | {name.split('/')[1]} | {' | '.join(_cells([record]))} | {share} | {still} |")
    if not lines:
        return []
    head = [
        "## Plait with another option",
        "",
        "The share is that of the tokens per second above. A save stands still for the seconds that later steps lose;",
        "the first one also takes the memory that all others use again.",
        "",
        "| model | with | tokens/s | MFU | GiB | share | the first save stands still, later ones, s |",
        "|---|---|---|---|---|---|---|",
    ]
    return [*head, *lines, ""]


def _others(parts: dict[str, Record]) -> list[str]:
    lines = []
    for name, record in parts.items():
        if "/" not in name and _ran(record):
            lines += [f"## {name}", "", record["said"], ""]
    return lines
