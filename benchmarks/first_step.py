"""Seconds from the command to its first step and to its end: python benchmarks/first_step.py [--cycles N] [overrides]

`plait train` and the bare loop under torchrun train one step of the debug model on two ranks of this machine, in turns.
The bare loop runs twice per cycle, which shows how much equal runs differ.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import about

HERE = Path(__file__).resolve().parent
RANKS = 2
ONE_STEP = ("train.steps=1", "metrics.log_every=1", "schedule.warmup_steps=0")
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), f"--nproc-per-node={RANKS}", "--standalone"]
BARE = [*TORCHRUN, str(HERE / "bare_loop.py"), *ONE_STEP]
PLAIT = [
    *(str(Path(sys.executable).with_name("plait")), "train", "strategy=[fsdp2]", f"launch.nproc_per_node={RANKS}"),
    *("launch.device=cpu", "checkpoint.enabled=false", "validation.interval=0", *ONE_STEP),
]
LOOPS = {"plait": PLAIT, "bare": BARE, "bare again": BARE}
MOMENTS = ("a first word", "the first step is done", "the end after that", "in all")


def run(command: list[str]) -> list[float]:
    """Seconds of each of MOMENTS."""
    with tempfile.TemporaryDirectory(prefix="plait-first-step-") as scratch:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        began, word, step, lines = time.perf_counter(), 0.0, 0.0, list[str]()
        with subprocess.Popen(
            command, cwd=scratch, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                now = time.perf_counter() - began
                word = word or now
                step = now if line.startswith("step 1") else step
                lines.append(line)
        whole = time.perf_counter() - began
    if process.returncode or not step:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(lines)}")
    return [word, step, whole - step, whole]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=5, help="runs of each that count")
    parser.add_argument("--warm-up", type=int, default=1, help="runs of each before, which read files from the disk")
    parser.add_argument("overrides", nargs="*", help="of plait train, for all loops")
    arguments = parser.parse_args()
    print(f"{about()}\n", flush=True)
    spent: dict[str, list[list[float]]] = {name: [] for name in LOOPS}
    for cycle in range(-arguments.warm_up, arguments.cycles):
        for name in list(LOOPS) if cycle % 2 else list(LOOPS)[::-1]:
            found = run([*LOOPS[name], *arguments.overrides])
            if cycle >= 0:
                spent[name].append(found)
    print("| seconds, medians | plait | bare | plait / bare | bare again / bare |")
    print("|---|---|---|---|---|")
    for i, moment in enumerate(MOMENTS):
        seconds = {name: [each[i] for each in times] for name, times in spent.items()}
        middle = {name: statistics.median(times) for name, times in seconds.items()}
        ratios = [ratio(seconds[name], seconds["bare"]) for name in ("plait", "bare again")]
        print(f"| {moment} | {middle['plait']:.2f} | {middle['bare']:.2f} | {ratios[0]} | {ratios[1]} |")


def ratio(above: list[float], below: list[float]) -> str:
    """The median of the cycles' ratios, and the least and the greatest."""
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


if __name__ == "__main__":
    main()
