"""How long start-up takes: python benchmarks/startup.py [--repeats N] [--model M] [--world N]

1. The commands that answer without torch, compared with an empty Python.
2. How many elements a rank draws to initialise its quarter of llama3_debug.
3. The time that one rank of a large world takes until its share of a large model has values.
4. What one thread draws and what two do, and an estimate of the time for all of that model on 16 cores.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import about, run_ranks

SHARD = 4
SCRIPT = str(Path(__file__).resolve())
PLAIT = str(Path(sys.executable).with_name("plait"))
EMPTY = [sys.executable, "-c", "pass"]
COMMANDS = {"plait plugins": [PLAIT, "plugins"], "plait train --cfg job": [PLAIT, "train", "--cfg", "job"]}


def seconds_of(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def imports_torch(command: list[str]) -> bool:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command], check=True, capture_output=True, text=True, encoding="utf-8"
    )
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
    """The model of these overrides under fsdp2, on the meta device. A process group of that size must run."""
    from plait.host import check, compose
    from plait.parallel.apply import set_up

    overrides = ["strategy=[fsdp2]", "launch.device=cpu", f"launch.nproc_per_node={world_size}", *overrides]
    return set_up(check(compose(overrides)).assembly, fill=False)


def fill(applied: Any) -> int:
    """Give this rank's share storage and values; returns how many elements it drew."""
    from plait.parallel.initialize import initialise, materialise

    materialise(applied.parts[0], applied.device)
    return initialise(applied.parts[0], applied.spec, seed=0)


def share(applied: Any) -> tuple[int, int]:
    """How many elements this rank holds, and how many are in its own rows (1-D parameters count whole)."""
    from plait.parallel.initialize import held_indices

    rows = [p.numel() // len(p) * len(held_indices(p, 0)) if p.dim() > 1 else p.numel() for p in applied.parameters()]
    return sum(p.to_local().numel() for p in applied.parameters()), sum(rows)


def draws() -> None:
    """One of SHARD ranks; rank 0 prints what each drew."""
    import torch.distributed as dist

    from plait.parallel.process_group import end_group, start_group

    start_group("cpu")
    applied = set_up(["model=llama3_debug"], SHARD)
    answers: list[Any] = [None] * SHARD
    dist.all_gather_object(answers, (fill(applied), *share(applied)))
    if dist.get_rank() == 0:
        print(f"\ninitialising llama3_debug, {applied.run.parameters:,} parameters, at shard {SHARD}")
        for rank, (drawn, held, own) in enumerate(answers):
            said = "within" if drawn <= own else "MORE THAN"
            print(f"  rank {rank} drew {drawn:,}, {said} its own rows of {own:,} (1-D ones whole); it holds {held:,}")
    end_group()


def one_of_many(model: str, world_size: int) -> None:
    """Rank 0 of a world whose other ranks do not exist, from an interpreter that has imported nothing."""
    laps = [time.perf_counter()]
    import torch

    import plait.check.check  # noqa: F401
    from plait.parallel.simulated import simulated

    laps.append(time.perf_counter())
    torch.set_num_threads(1)
    with simulated(world_size):
        applied = set_up([f"model={model}"], world_size)
        laps.append(time.perf_counter())
        drawn = fill(applied)
        laps.append(time.perf_counter())
    imports, shaping, drawing = (after - before for before, after in pairwise(laps))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\n{model}, {applied.run.parameters:,} parameters, one rank of {world_size}, one thread")
    print(f"  {imports:7.2f} s to import torch and Plait")
    print(f"  {shaping:7.2f} s to compose, check, build on meta and shard")
    print(f"  {drawing:7.2f} s to draw {drawn:,} elements ({drawn / drawing / 1e6:.0f} M/s)")
    print(f"  {sum((imports, shaping, drawing)):7.2f} s in all, resident peak {peak:.1f} GiB")


def threads(model: str, cores: int = 16) -> None:
    """Drawing a row of one value takes as long as what holds Python's lock, which no thread shares; the rest of a row
    is drawn by all threads at once (Amdahl's law)."""
    import torch

    from plait.compose.build import build_model
    from plait.host import compose
    from plait.parallel.initialize import fill

    built, spec = build_model(compose([f"model={model}"]).model)
    params = dict(built.named_parameters())
    drawn = spec.init_of(max(params, key=lambda name: params[name].numel()))

    def seconds(rows: int, width: int, count: int) -> float:
        """The least of nine times; on one thread those of the processor, which others do not disturb."""
        clock = time.process_time if count == 1 else time.perf_counter
        found, param = [], torch.empty(rows, width)
        with ThreadPoolExecutor(count) as pool:
            for _ in range(9):
                began = clock()
                fill(param, "w", drawn, 0, pool)
                found.append(clock() - began)
        return min(found)

    torch.set_num_threads(1)  # of an operation; rows are given to the pool's threads
    rows, width = 4000, 4096
    locked = seconds(rows, 1, 1) / rows
    one, two = (seconds(rows, width, count) for count in (1, 2))
    free = one / rows - locked
    print(f"\ndrawing rows of {width} values with {drawn}")
    print(f"  {rows * width / one / 1e6:7.0f} M/s on one thread, {rows * width / two / 1e6:.0f} M/s on two")
    print(f"  {locked * 1e6:7.1f} us of the {one / rows * 1e6:.1f} us for a row hold Python's lock")
    all_rows = sum(len(param) if param.dim() > 1 else 1 for param in params.values())
    values = sum(param.numel() for param in params.values())
    whole = all_rows * locked + values / width * free / cores
    print(f"  {whole:7.1f} s for {model} on {cores} cores, ESTIMATED: {values:,} values in {all_rows:,} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="of each command")
    parser.add_argument("--model", default="llama3_8b", help="the large model")
    parser.add_argument("--world", type=int, default=64, help="the ranks that share it")
    parser.add_argument("--alone", action="store_true", help="only parts 3 and 4, in this process")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        return draws()
    if arguments.alone:
        one_of_many(arguments.model, arguments.world)
        return threads(arguments.model)
    print(f"{about()}\n")
    with tempfile.TemporaryDirectory(prefix="plait-startup-") as scratch:
        os.chdir(scratch)
        commands(arguments.repeats)
        sys.stdout.flush()
        run_ranks(SHARD, SCRIPT, cwd=scratch)
        alone = [sys.executable, SCRIPT, "--alone", f"--model={arguments.model}", f"--world={arguments.world}"]
        subprocess.run(alone, check=True)


if __name__ == "__main__":
    main()
