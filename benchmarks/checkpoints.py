"""What saving and loading cost beside torch alone: python benchmarks/checkpoints.py [--cycles N] [--megabytes N]

Two ranks share a model under fsdp2 and AdamW's state of it. In each cycle these take turns, each in a new folder:

1. a synchronous save, beside `dcp.save`; older checkpoints are removed outside the time;
2. the time that an asynchronous save stands still, beside `torch.save` of what the rank holds;
3. a load as a resume does it, beside `dcp.load`. The files are still in the page cache.

A time is that of the slowest rank. `--folder` sets the disk.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import about, run_ranks

SCRIPT = str(Path(__file__).resolve())
RANKS = 2
PAIRS = [
    ("a synchronous save", "plait sync", "dcp.save", "dcp.save again"),
    ("an asynchronous save stands still", "plait async", "torch.save", "torch.save again"),
    ("the load of a resume", "plait load", "dcp.load", "dcp.load again"),
]


def build(megabytes: int) -> tuple[Any, Any]:
    """A sharded model and its optimizer after a step, `megabytes` over all ranks: weights and two moments."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    width = 1024
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * width * width)))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    for module in (*model, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def as_rank(megabytes: int, cycles: int, folder: Path) -> None:
    """Writes the seconds of each cycle to `seconds-<rank>.json`."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor

    from plait.host import Saver, Store, load
    from plait.parallel.state import canonical_state

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    model, optimizer = build(megabytes)
    rank = dist.get_rank()
    state, after = canonical_state(model, optimizer)
    local = {key: t.to_local() if isinstance(t, DTensor) else t for key, t in state.items()}
    savers = {mode: Saver(Store(folder / mode), mode, keep=sys.maxsize) for mode in ("sync", "async")}
    savers["sync"].save(state, 1)
    dcp.save(state, checkpoint_id=folder / "dcp")
    step = iter(range(2, sys.maxsize))

    def remove(name: str) -> None:
        if rank == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
        dist.barrier()

    def remove_older(mode: str) -> None:
        saver = savers[mode]
        saver.wait()
        if rank == 0:
            saver.store.prune(1)
        dist.barrier()

    def torch_save() -> None:
        torch.save(local, folder / f"local-{rank}")

    turns: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {  # what is measured, what follows
        "plait sync": (lambda: savers["sync"].save(state, next(step)), lambda: remove_older("sync")),
        "dcp.save": (lambda: dcp.save(state, checkpoint_id=folder / "a"), lambda: remove("a")),
        "dcp.save again": (lambda: dcp.save(state, checkpoint_id=folder / "b"), lambda: remove("b")),
        "plait async": (lambda: savers["async"].save(state, next(step)), lambda: remove_older("async")),
        "torch.save": (torch_save, lambda: None),
        "torch.save again": (torch_save, lambda: None),
        "plait load": (
            lambda: load(savers["sync"].store.path_of(savers["sync"].saved or 0), state, after),
            lambda: None,
        ),
        "dcp.load": (lambda: dcp.load(dict(state), checkpoint_id=folder / "dcp"), lambda: None),
        "dcp.load again": (lambda: dcp.load(dict(state), checkpoint_id=folder / "dcp"), lambda: None),
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for cycle in range(cycles + 1):  # the first warms up, and the first asynchronous save takes its memory
        order = list(turns)
        random.Random(cycle).shuffle(order)  # after a save the disk may still be slow
        for name in order:
            measured, then = turns[name]
            os.sync()
            dist.barrier()
            began = time.perf_counter()
            measured()
            seconds[name].append(time.perf_counter() - began)
            then()
    held = sum(tensor.nbytes for tensor in local.values())
    Path(f"seconds-{rank}.json").write_text(json.dumps({"bytes": held, "seconds": seconds}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def ratio(above: list[float], below: list[float]) -> str:
    """The median of the cycles' ratios, and the least and the greatest."""
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=9, help="turns of each that count")
    parser.add_argument("--megabytes", type=int, default=600, help="of state, on both ranks together")
    parser.add_argument("--folder", help="a folder on the disk to write to; default: that of temporary files")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.as_rank:
        return as_rank(asked.megabytes, asked.cycles, Path(asked.folder))
    print(f"{about()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="plait-checkpoints-", dir=asked.folder) as scratch:
        given = [f"--cycles={asked.cycles}", f"--megabytes={asked.megabytes}", f"--folder={scratch}", "--as-rank"]
        run_ranks(RANKS, SCRIPT, *given, cwd=scratch)
        found = [json.loads(Path(scratch, f"seconds-{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]
    print(f"{sum(each['bytes'] for each in found) / 1e6:.0f} MB on {RANKS} ranks, {asked.cycles} cycles\n")
    slowest = {
        name: [max(times) for times in zip(*(each["seconds"][name] for each in found), strict=True)]
        for name in found[0]["seconds"]
    }
    first = slowest["plait async"][0]
    spent = {name: times[1:] for name, times in slowest.items()}
    print("| | plait, s | torch, s | plait / torch | torch again / torch |")
    print("|---|---|---|---|---|")
    for what, ours, theirs, again in PAIRS:
        middle = [f"{statistics.median(spent[name]):.2f}" for name in (ours, theirs)]
        print(f"| {what} | {' | '.join(middle)} | {ratio(spent[ours], spent[theirs])} |", end="")
        print(f" {ratio(spent[again], spent[theirs])} |")
    print(f"\nThe first asynchronous save, which takes its memory, stood still for {first:.2f} s.")


if __name__ == "__main__":
    main()
