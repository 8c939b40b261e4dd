"""What a trace of torch's profiler says of a GPU's time: its longest kernels, how long it idles, how much it starts."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LONGEST = 15
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Event = dict[str, Any]


def described(folder: Path, steps: int) -> str:
    """Of the trace in the run's folder, which covers `steps` steps; the operators of a CPU if there are no kernels."""
    (file,) = folder.glob("profile/*.json")
    return table(json.loads(file.read_text(encoding="utf-8"))["traceEvents"], steps)


def table(events: Iterable[Event], steps: int) -> str:
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    work = [event for event in timed if event.get("cat") in ON_DEVICE]
    what = "kernels and copies"
    if not work:
        work, what = [event for event in timed if event.get("cat") == "cpu_op"], "operators of a CPU, with those inside"
    if not work:
        return "the trace has no kernels"
    busy, whole = _busy(work)
    spent: dict[str, list[float]] = defaultdict(list)
    for event in work:
        spent[event["name"]].append(event["dur"])
    every = sum(event["dur"] for event in work)
    lines = [
        f"Per step: {len(work) / steps:.0f} {what}, {whole / steps / 1000:.2f} ms; idle {1 - busy / whole:.1%} of it.",
        "",
        "| longest | per step | ms a step | share |",
        "|---|---|---|---|",
    ]
    for name, parts in sorted(spent.items(), key=lambda item: -sum(item[1]))[:LONGEST]:
        short = name.replace("|", "/")[:100]
        lines.append(
            f"| `{short}` | {len(parts) / steps:.1f} | {sum(parts) / steps / 1000:.3f} | {sum(parts) / every:.1%} |"
        )
    return "\n".join(lines)


def _busy(work: list[Event]) -> tuple[float, float]:
    """(Microseconds in which one of them ran, from the first's start to the last's end)."""
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in work)
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy, until - spans[0][0]
