"""Compares training steps: several set-ups run in the same ranks and take turns, one step each."""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import run_ranks


def arguments(description: str | None, model: str, ranks: int, backends: Sequence[str] = ()) -> argparse.Namespace:
    """The command line's arguments. ranks: the default number of ranks without a GPU. backends: of which to choose."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=30, help="cycles that count")
    parser.add_argument("--warm-up", type=int, default=5, help="cycles before that do not")
    parser.add_argument("--model", default=model)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or ranks)
    parser.add_argument("--batch", type=int, default=4, help="samples per rank")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    if backends:
        parser.add_argument("--backends", nargs="+", choices=backends, default=backends, help="all, unless given")
    return parser.parse_args()


def in_turns(
    steps: dict[str, Callable[[], None]],
    cycles: int,
    warm_up: int,
    device: str,
    begin: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
    """Seconds of each set-up in each cycle. Every other cycle takes them in reverse order."""
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for cycle in range(cycles + warm_up):
        for name in list(steps) if cycle % 2 else list(steps)[::-1]:
            begin()
            before = time.perf_counter()
            steps[name]()
            if device == "cuda":
                torch.cuda.synchronize()
            if cycle >= warm_up:
                spent[name].append(time.perf_counter() - before)
    return {name: np.array(seconds) for name, seconds in spent.items()}


def training_step(
    config: dict[str, Any], strategies: Sequence[Any], batch: int, seq_len: int, **options: Any
) -> Callable[[], None]:
    """A step of the model of `config` on the same `batch` samples per rank. Options are those of plait.apply."""
    import torch.distributed as dist

    import plait
    from plait.compose.build import build_model
    from plait.host import make_optimizer

    built, spec = build_model(config["model"])
    applied = plait.apply(built, spec, strategies, seq_len=seq_len, **options)
    optimizer = make_optimizer(config["optimizer"], applied.parameters())
    drawn = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, config["model"]["vocab_size"], (batch, seq_len + 1), generator=drawn).to(applied.device)
    tokens = batch * seq_len * dist.get_world_size()

    def step() -> None:
        applied.step(plait.Batch(ids[:, :-1], ids[:, 1:]), optimizer, lambda dealt: lambda: tokens, max_norm=1.0)

    return step


def as_rank(steps: dict[str, Callable[[], None]], cycles: int, warm_up: int) -> None:
    """Run as a rank: writes times-<rank>.json."""
    import torch.distributed as dist

    device = "cuda" if torch.cuda.is_available() else "cpu"
    spent = in_turns(steps, cycles, warm_up, device, dist.barrier)
    Path(f"times-{dist.get_rank()}.json").write_text(
        json.dumps({n: list(s) for n, s in spent.items()}), encoding="utf-8"
    )
    dist.barrier()
    dist.destroy_process_group()


def slowest(script: str, asked: argparse.Namespace) -> dict[str, np.ndarray]:
    """Seconds of each step on its slowest rank. Runs `script` again as every rank, with the same arguments."""
    ranks, options = asked.ranks, {k: v for k, v in vars(asked).items() if k not in ("as_rank", "ranks")}
    again: list[str] = []
    for name, value in options.items():
        again += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list | tuple) else [value])]
    with tempfile.TemporaryDirectory(prefix="plait-turns-") as scratch:
        run_ranks(ranks, script, *again, "--as-rank", cwd=scratch)
        found = [json.loads(Path(scratch, f"times-{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    return {name: np.array([rank[name] for rank in found]).max(0) for name in found[0]}
