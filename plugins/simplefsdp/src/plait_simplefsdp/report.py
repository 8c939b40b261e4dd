"""Reports what the passes did: passes.json, a table in the log, an artifact of TORCH_TRACE."""

import json
import logging
from typing import Any

import torch.distributed as dist

from plait import Run
from plait.host import text
from plait_simplefsdp.torch_internals import trace

log = logging.getLogger("plait")


class Report:
    """Collects what `plan` returns, one graph at a time; graphs are made at their first use, so files are too."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.graphs: list[dict[str, Any]] = []

    def add(self, found: dict[str, Any]) -> None:
        self.graphs.append(found)
        trace(f"plait_simplefsdp_{found['graph']}", lambda: json.dumps(found))
        if dist.get_rank():
            return  # all ranks plan alike
        for line in table(found):
            log.info(line)
        if self.run.folder is not None:
            (self.run.folder / "passes.json").write_text(
                json.dumps({"graphs": self.graphs}, indent=2) + "\n", encoding="utf-8"
            )


def table(found: dict[str, Any]) -> list[str]:
    """A graph's report as lines."""
    before, after = found["before"], found["after"]
    rows = []
    for kind, entry in before["collectives"].items():
        now = after["collectives"].get(kind, {"count": 0, "bytes": 0})
        rows.append((kind, f"{entry['count']} -> {now['count']}, {text.size(now['bytes'])}"))
    rows += [
        ("exposed", f"{before['exposed_ms']:,.2f} -> {after['exposed_ms']:,.2f} ms"),
        ("peak", f"{text.size(before['peak_bytes'])} -> {text.size(after['peak_bytes'])}"),
        ("at best", f"{after['bound_ms']:,.2f} ms exposed, of {after['communication_ms']:,.2f} ms in all"),
    ]
    if sizes := [bucket["bytes"] for bucket in found["buckets"]]:
        rows.append(
            ("buckets", f"{len(sizes)}, of {text.size(sum(sizes) / len(sizes))}, {text.size(max(sizes))} at most")
        )
    moved, held = len(found["moved"]), len(found["held_back"])
    rows.append(("moved", f"{moved} starts and waits, {held} of them back for want of memory"))
    title = f"simplefsdp: the {found['graph']} graph before and after its passes; estimates are for {found['machine']}"
    return [title, *text.table(rows, indent="  ")]
