"""Runs the passes over one graph, and reports what they did."""

from collections.abc import Iterable
from typing import Any

from torch.fx import Graph

from plait import PlaitError
from plait_simplefsdp.bucket import by_block, by_time
from plait_simplefsdp.collectives import collectives, every
from plait_simplefsdp.estimate import Machine, times
from plait_simplefsdp.join import join
from plait_simplefsdp.memory import hold_back, peak
from plait_simplefsdp.reorder import one_ahead

GROUPING = {"bucket_block": by_block, "bucket_auto": by_time}


def plan(
    graph: Graph, kind: str, passes: Iterable[str], machine: Machine, expected: Iterable[str] = ()
) -> dict[str, Any]:
    """Run `passes` on a "forward", "backward" or "inference" graph, in place; returns a report of plain values.

    expected: kinds of collectives that move parameters or their gradients in such a graph. Raises PlaitError if a kind
        is
    missing: the passes would do nothing, and the run would be slow for no visible reason.
    """
    chosen = set(passes)
    there = {one.kind for one in collectives(graph)}
    if chosen and (missing := [one for one in expected if one not in there]):
        raise PlaitError(
            f"strategy.simplefsdp.passes={list(passes)} found nothing to act on in the {kind} graph: none of its "
            f"collectives is a {missing[0]} of parameters, so torch has lost their marks; "
            "passes=[] trains without, more slowly"
        ).at("strategy.simplefsdp.passes", list(passes), fits=([],))
    report: dict[str, Any] = {"graph": kind, "machine": machine.name, "before": _state(graph, machine), "buckets": []}
    for name, group_by in GROUPING.items():
        if name in chosen:
            for group in group_by(graph, machine):
                if len(group) == 1:
                    continue
                bucket = {
                    "kind": group[0].kind,
                    "blocks": sorted({c.bucket or "outside" for c in group}),
                    "parameters": len(group),
                    "bytes": sum(c.nbytes for c in group),
                }
                report["buckets"].append({"node": join(graph, group).name, **bucket})
    without = peak(graph)[0]
    report["moved"] = one_ahead(graph) if "reorder" in chosen else {}
    report["held_back"] = hold_back(graph, without) if "memory" in chosen else []
    for name in report["held_back"]:
        del report["moved"][name]
    report["after"] = _state(graph, machine)
    return report


def _state(graph: Graph, machine: Machine) -> dict[str, Any]:
    counts: dict[str, dict[str, int]] = {}
    for one in every(graph):
        entry = counts.setdefault(one.kind, {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += one.nbytes
    took = times(graph, machine)
    return {
        "collectives": counts,
        "compute_ms": took.compute * 1e3,
        "communication_ms": took.communication * 1e3,
        "exposed_ms": took.exposed * 1e3,
        "bound_ms": took.bound * 1e3,
        "peak_bytes": peak(graph)[0],
    }
