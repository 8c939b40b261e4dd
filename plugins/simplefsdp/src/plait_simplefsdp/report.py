"""Reports what the passes did: passes.json, a table in the log, an artifact of TORCH_TRACE."""

import json
import logging
from typing import Any

import torch.distributed as dist

from plait import Run
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
    lines = [
        f"simplefsdp: the {found['graph']} graph before and after its passes; estimates are for {found['machine']}"
    ]
    for kind, entry in before["collectives"].items():
        now = after["collectives"].get(kind, {"count": 0, "bytes": 0})
        lines.append(f"  {kind:<15} {entry['count']:>5} -> {now['count']:<5} {now['bytes'] / 2**20:,.1f} MiB")
    for key, title in (("exposed_ms", "exposed, ms"), ("peak_bytes", "peak, MiB")):
        scale = 1 / 2**20 if key == "peak_bytes" else 1
        lines.append(f"  {title:<15} {before[key] * scale:,.2f} -> {after[key] * scale:,.2f}")
    lines.append(
        f"  {'at best':<15} {after['bound_ms']:,.2f} ms exposed, of {after['communication_ms']:,.2f} ms in all"
    )
    sizes = [bucket["bytes"] / 2**20 for bucket in found["buckets"]]
    if sizes:
        lines.append(
            f"  {'buckets':<15} {len(sizes)}, of {sum(sizes) / len(sizes):,.1f} MiB, {max(sizes):,.1f} at most"
        )
    moved, held = len(found["moved"]), len(found["held_back"])
    lines.append(f"  {'moved':<15} {moved} starts and waits, {held} of them back for want of memory")
    return lines
