"""What experts cost: python benchmarks/experts.py [--cycles N] [--model NAME] [--ranks N]

1. torch's grouped product against a loop over the experts: forward and backward of one block's experts, uneven counts,
   both in one process, a cycle each, in turns.
2. Tokens a second of a mixture of experts with its experts on 1, 2 and 4 ranks of the same ranks: all three live in the
   same processes and take a step in turns, so that a slow minute slows all. A step is as long as its slowest rank's.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import about, run_ranks
from overhead import ratio

# experts, rows in all, dim, ffn_dim
SIZES = {
    "cpu": [(8, 4096, 256, 208), (64, 4096, 256, 64), (128, 2048, 512, 192)],
    "cuda": [(64, 32768, 2048, 1408), (128, 65536, 2048, 768), (256, 32768, 7168, 2048)],
}
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}
DEGREES = (1, 2, 4)


def grouped_against_loop(device: str, cycles: int, warm_up: int) -> None:
    from plait.models import grouped

    print("| experts | rows | dim | ffn_dim | dtype | grouped, ms | loop, ms | loop / grouped (95%) |")
    print("|---|---|---|---|---|---|---|---|")
    for experts, rows, dim, ffn in SIZES[device]:
        for dtype in DTYPES[device]:
            torch.manual_seed(0)
            share = torch.rand(experts).square()
            counts = torch.multinomial(share, rows, replacement=True).bincount(minlength=experts).to(device)
            x = torch.randn(rows, dim, device=device, dtype=dtype, requires_grad=True)
            w = torch.randn(experts, ffn, dim, device=device, dtype=dtype, requires_grad=True)
            assert grouped.runs_grouped(x, w), f"torch's grouped product does not take {dtype} on {device}"

            def by_group(x: Any = x, w: Any = w, counts: Any = counts) -> None:
                out = grouped.grouped_linear(x, w, counts)
                torch.autograd.grad(out, (x, w), torch.ones_like(out))

            def by_loop(x: Any = x, w: Any = w, counts: Any = counts) -> None:
                parts = zip(x.split(counts.tolist()), w, strict=True)
                out = torch.cat([x @ w.mT for x, w in parts])
                torch.autograd.grad(out, (x, w), torch.ones_like(out))

            spent = in_turns({"grouped": by_group, "loop": by_loop}, cycles, warm_up, device)
            middle = {name: np.median(seconds) * 1000 for name, seconds in spent.items()}
            of = ratio([spent["loop"]], [spent["grouped"]], np.median)
            kind = str(dtype).removeprefix("torch.")
            figures = f"{middle['grouped']:.2f} | {middle['loop']:.2f} | {of}"
            print(f"| {experts} | {rows} | {dim} | {ffn} | {kind} | {figures} |", flush=True)


def in_turns(
    steps: dict[str, Callable[[], None]],
    cycles: int,
    warm_up: int,
    device: str,
    begin: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
    """Seconds of each cycle of each; every other cycle goes through them backwards."""
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


def as_rank(model: str, cycles: int, warm_up: int, batch: int, seq_len: int) -> None:
    """A rank of the second part: writes times-<rank>.json."""
    import logging

    import torch.distributed as dist

    import plait
    from plait.build import build_model
    from plait.compose import resolve
    from plait.optimizer import make_optimizer
    from plait_expert_parallel import ExpertParallel
    from plait_fsdp2 import Fsdp2

    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # of two sums for a norm that is one number
    config = resolve([f"model={model}", "strategy=[fsdp2]"])

    def step_with(degree: int) -> Callable[[], None]:
        built, spec = build_model(config["model"])
        strategies = [Fsdp2(), *([ExpertParallel(degree)] if degree > 1 else [])]
        applied = plait.apply(built, spec, strategies, seq_len=seq_len)
        optimizer = make_optimizer(config["optimizer"], applied.parameters())
        drawn = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.randint(0, config["model"]["vocab_size"], (batch, seq_len + 1), generator=drawn).to(applied.device)
        tokens = batch * seq_len * dist.get_world_size()

        def step() -> None:
            loss = plait.cross_entropy_sum(applied.parts[0](ids[:, :-1]), ids[:, 1:])
            applied.backward(loss, tokens)
            applied.clip_grads(1.0)
            optimizer.step()
            optimizer.zero_grad()
            applied.after_step(optimizer, 1)

        return step

    degrees = [d for d in DEGREES if d <= int(os.environ["WORLD_SIZE"])]
    steps = {str(degree): step_with(degree) for degree in degrees}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spent = in_turns(steps, cycles, warm_up, device, dist.barrier)
    Path(f"times-{dist.get_rank()}.json").write_text(json.dumps({n: list(s) for n, s in spent.items()}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=30, help="cycles that count")
    parser.add_argument("--warm-up", type=int, default=5, help="cycles before that do not")
    parser.add_argument("--model", default="deepseek_v3_debug")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 4)
    parser.add_argument("--batch", type=int, default=4, help="samples a rank")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.as_rank:
        return as_rank(asked.model, asked.cycles, asked.warm_up, asked.batch, asked.seq_len)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{about()}\n{'' if device == 'cuda' else 'NOT MEASURED ON A GPU'}\n")
    print("## Grouped product against a loop, forward and backward\n")
    grouped_against_loop(device, asked.cycles, asked.warm_up)
    print(f"\n## {asked.model}, {asked.ranks} ranks, {asked.batch} x {asked.seq_len} tokens a rank, fsdp2\n")
    numbers = [
        f"--{name}={value}" for name, value in vars(asked).items() if name not in ("as_rank", "ranks", "warm_up")
    ]
    numbers = [n.replace("_", "-", 1) if n.startswith("--seq_len") else n for n in numbers]
    with tempfile.TemporaryDirectory(prefix="plait-experts-") as scratch:
        run_ranks(asked.ranks, __file__, *numbers, f"--warm-up={asked.warm_up}", "--as-rank", cwd=scratch)
        ranks = [json.loads(Path(scratch, f"times-{rank}.json").read_text()) for rank in range(asked.ranks)]
    slowest = {degree: np.array([rank[degree] for rank in ranks]).max(0) for degree in ranks[0]}
    tokens = asked.ranks * asked.batch * asked.seq_len
    print("| ep | step, ms | tokens/s | step / ep 1 (95%) |\n|---|---|---|---|")
    for degree, seconds in slowest.items():
        middle = np.median(seconds)
        beside = ratio([seconds], [slowest["1"]], np.median)
        print(f"| {degree} | {middle * 1000:.1f} | {tokens / middle:,.0f} | {beside} |")


if __name__ == "__main__":
    main()
