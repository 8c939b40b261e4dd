"""Tokens per second, MFU and peak memory: python benchmarks/throughput.py [overrides]

With a GPU: llama3 1b and 8b, eager and compiled, on all GPUs of the machine, within 8 minutes. Without: llama3_debug.
Overrides are those of plait train and apply to every run: 'strategy=[simplefsdp]' train.local_batch_size=2
Each run is a separate `plait train`. If one needs too much memory or time, that is reported and the next begins.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from machine import about

from plait import PlaitError
from plait.host import compose

SECONDS = 465  # for all runs together
FIXED = ("data=stdlib", "checkpoint.enabled=false", "validation.interval=0", "metrics.tensorboard=false")
ON_GPU = ("precision.param=bfloat16", "optimizer.lr=0.0003")
OUT_OF_MEMORY = re.compile(r"out of ?memory|can't allocate memory", re.IGNORECASE)


@attrs.frozen
class Case:
    """One model, and the options of all its runs. warm_up: first steps that do not count. seconds: the limit
    of each run. memory: GiB that it takes on a GPU."""

    model: str
    overrides: tuple[str, ...]
    steps: int
    warm_up: int
    seconds: float
    memory: float = 0


GPU = (
    Case("llama3_1b", (*ON_GPU, "train.seq_len=4096", "train.local_batch_size=4"), 30, 10, 150),
    Case("llama3_8b", (*ON_GPU, "train.seq_len=8192", "train.local_batch_size=1", "remat.mode=full"), 15, 5, 200, 121),
)
CPU = (Case("llama3_debug", (), 12, 4, 180),)


def overrides_of(case: Case, compiled: bool, given: list[str]) -> list[str]:
    own = [f"model={case.model}", f"train.steps={case.steps}", f"compile.enabled={compiled}".lower()]
    return ["strategy=[fsdp2]", *FIXED, *case.overrides, *own, "run.name=throughput", *given]


def run(
    overrides: list[str], seconds: float, keep: Path | None = None, read: Callable[[Path], None] | None = None
) -> tuple[list[dict[str, Any]], str]:
    """The rows of metrics.jsonl of one `plait train`, and why it ended early. keep: a file that gets all it said.
    read: called with the run's folder, if it ended well."""
    if seconds <= 0:
        return [], "no time left"
    with tempfile.TemporaryDirectory(prefix="plait-throughput-") as scratch:
        folder, output = Path(scratch, "runs/throughput"), Path(scratch, "output")
        why = ""
        with open(output, "w", encoding="utf-8") as file:
            try:
                command = [sys.executable, "-m", "plait", "train", *overrides]
                code = subprocess.run(command, cwd=scratch, stdout=file, stderr=file, timeout=seconds).returncode
            except subprocess.TimeoutExpired:  # it is killed, and its ranks go with it
                why, code = f"not done after {seconds:.0f} s", 0
        said = [line for line in output.read_text(errors="replace", encoding="utf-8").splitlines() if line.strip()]
        logs = "".join(log.read_text(errors="replace", encoding="utf-8") for log in folder.glob("ranks/*.log"))
        if keep is not None:
            keep.write_text("\n".join([*said, logs]), encoding="utf-8")
        if code:
            why = "out of memory" if OUT_OF_MEMORY.search(logs) else said[-1] if said else f"exit code {code}"
        if read is not None and not why:
            read(folder)
        rows = folder / "metrics.jsonl"
        lines = rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []
        return [json.loads(line) for line in lines], why


@attrs.frozen
class Measured:
    """Of the steps after the warm-up: tokens over wall clock, the mean step in seconds, the model's share of the
    device's peak (None if that is unknown), and the largest memory in bytes."""

    tokens_per_second: float
    step_seconds: float
    mfu: float | None
    peak_memory_bytes: int


def measured(rows: list[dict[str, Any]], warm_up: int) -> Measured | None:
    """None if no step counts."""
    counted = rows[warm_up:]
    if not counted:
        return None
    tokens = rows[0]["tokens"]
    seconds = sum(tokens / row["tokens_per_second"] for row in counted) / len(counted)
    last, speed = counted[-1], tokens / seconds
    mfu = None if last["mfu"] is None else last["mfu"] / last["tokens_per_second"] * speed
    return Measured(speed, seconds, mfu, max(row["peak_memory_bytes"] for row in counted))


def table_row(case: Case, config: dict[str, Any], rows: list[dict[str, Any]], why: str) -> list[str]:
    train, precision = config["train"], config["precision"]
    stated = [
        case.model,
        "compiled" if config["compile"]["enabled"] else "eager",
        f"{train['local_batch_size']} x {train['seq_len']}",
        config["remat"]["mode"],
        "/".join(precision[key] for key in ("storage", "param", "reduce")),
    ]
    found = measured(rows, case.warm_up)
    if why or found is None:
        return [*stated, why or "no step counted", "", "", ""]
    mfu = "unknown" if found.mfu is None else f"{found.mfu:.1%}"
    memory = f"{found.peak_memory_bytes / 2**30:.1f} GiB"
    return [*stated, f"{found.tokens_per_second:,.0f}", f"{found.step_seconds:.3f} s", mfu, memory]


def main() -> None:
    given = sys.argv[1:]
    if {"-h", "--help"} & set(given):
        print(__doc__)
        return
    began = time.monotonic()
    gpus = torch.cuda.device_count()
    print(about())
    if gpus:
        print(f"{gpus} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}; memory: the allocator's peak")
    else:
        print("NOT MEASURED ON A GPU, as this machine has none: llama3_debug on its processor; memory: a resident peak")
    print(f"overrides: {' '.join(given) or 'none'}; text: the standard library's, as bytes\n")
    heads = ("model", "mode", "batch a rank", "recomputed", "stored/computed/summed in")
    print(" | ".join([*heads, "tokens/s", "step", "MFU", "peak memory"]), flush=True)
    for case in GPU if gpus else CPU:
        for compiled in (False, True):
            left = min(case.seconds, SECONDS - (time.monotonic() - began))
            overrides = overrides_of(case, compiled, given)
            try:
                config = compose(overrides).plain()
            except PlaitError as error:
                sys.exit(f"throughput: {error}")
            print(" | ".join(table_row(case, config, *run(overrides, left))), flush=True)


if __name__ == "__main__":
    main()
