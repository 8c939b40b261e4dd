"""How long it takes until something happens: python benchmarks/startup.py [--repeats N] [--model M] [--world N]

1. The commands that answer without torch, beside an empty Python.
2. How many numbers a rank draws to initialise its quarter of llama3_debug.
3. The way of one rank of a large world to its filled share of a large model.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import about, run_ranks

SHARD = 4
PLAIT = str(Path(sys.executable).with_name("plait"))
EMPTY = [sys.executable, "-c", "pass"]
COMMANDS = {"plait plugins": [PLAIT, "plugins"], "plait train --cfg job": [PLAIT, "train", "--cfg", "job"]}


def seconds_of(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def imports_torch(command: list[str]) -> bool:
    done = subprocess.run([sys.executable, "-X", "importtime", *command], check=True, capture_output=True, text=True)
    return any(line.split("|")[-1].strip() == "torch" for line in done.stderr.splitlines())


def commands(repeats: int) -> None:
    times: dict[str, list[float]] = {"python -c pass": [], **{name: [] for name in COMMANDS}}
    for _ in range(repeats):  # in turn, so that a slow minute slows all
        for name, command in {"python -c pass": EMPTY, **COMMANDS}.items():
            times[name].append(seconds_of(command))
    empty = statistics.median(times["python -c pass"])
    print(f"commands, median of {repeats}")
    print(f"  {'python -c pass':<22} {empty:6.3f} s")
    for name, command in COMMANDS.items():
        torch = "imports torch" if imports_torch(command) else "no torch"
        middle = statistics.median(times[name])
        print(f"  {name:<22} {middle:6.3f} s, {middle - empty:5.3f} s more ({min(times[name]):.3f} at best); {torch}")


def set_up(overrides: list[str], world_size: int) -> Any:
    """The model of these overrides under fsdp2, still without values."""
    from plait.build import build_model
    from plait.check import check
    from plait.compose import resolve
    from plait.plugins import create
    from plait.weave import new_run, set_up

    config = check(resolve(["strategy=[fsdp2]", "launch.device=cpu", *overrides]), world_size).config
    model, spec = build_model(config.model)
    strategies = {name: create(name, options) for name, options in config.strategy.items()}
    return set_up(model, new_run(config, spec, model, world_size, "cpu", strategies), fill=False)


def fill(applied: Any) -> tuple[int, int, int]:
    """Draw a rank's share; returns how many numbers it drew, how many it may at most, and how many it holds."""
    from plait.initialise import held_indices, initialise, materialise

    materialise(applied.parts[0], applied.device)
    drawn, own, held = 0, 0, 0
    for param in applied.parameters():
        rows = len(held_indices(param, 0)) if param.dim() > 1 else param.shape[0]
        own += rows * param[0].numel() if False else rows * (param.numel() // param.shape[0])
        held += param.to_local().numel()
    drawn = initialise(applied.parts[0], applied.spec, seed=0)
    return drawn, own, held
