"""What experts cost: python benchmarks/experts.py [--cycles N] [--model NAME] [--ranks N]

1. torch's grouped product compared with a loop over the experts: forward and backward of one block's experts with
   uneven counts. Both take turns in one process.
2. Tokens per second of a mixture whose experts are divided over 1, 2 and 4 ranks. All three layouts run in the same
   processes and take turns, one step each, so that a slow minute slows all. A step takes as long as its slowest rank.
"""

import os
from typing import Any

import numpy as np
import torch
from machine import about
from overhead import ratio
from turns import arguments, as_rank, in_turns, slowest, training_step

# experts, rows in all, dim, ffn_dim
SIZES = {
    "cpu": [(8, 4096, 256, 208), (64, 4096, 256, 64), (128, 2048, 512, 192)],
    "cuda": [(64, 32768, 2048, 1408), (128, 65536, 2048, 768), (256, 32768, 7168, 2048)],
}
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}
DEGREES = (1, 2, 4)


def grouped_against_loop(device: str, cycles: int, warm_up: int) -> None:
    from plait.ops import grouped

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


def as_rank_of(model: str, cycles: int, warm_up: int, batch: int, seq_len: int) -> None:
    import logging

    from plait.host import compose
    from plait_expert_parallel import ExpertParallel
    from plait_fsdp2 import Fsdp2

    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # of two sums for a norm that is one number
    config = compose([f"model={model}", "strategy=[fsdp2]"]).plain()
    steps = {}
    for degree in DEGREES:
        if degree <= int(os.environ["WORLD_SIZE"]):
            strategies = [Fsdp2(), *([ExpertParallel(degree)] if degree > 1 else [])]
            steps[str(degree)] = training_step(config, strategies, batch, seq_len)
    as_rank(steps, cycles, warm_up)


def main() -> None:
    asked = arguments(__doc__, "deepseek_v3_debug", 4)
    if asked.as_rank:
        return as_rank_of(asked.model, asked.cycles, asked.warm_up, asked.batch, asked.seq_len)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{about()}\n{'' if device == 'cuda' else 'NOT MEASURED ON A GPU'}\n")
    print("## Grouped product against a loop, forward and backward\n")
    grouped_against_loop(device, asked.cycles, asked.warm_up)
    print(f"\n## {asked.model}, {asked.ranks} ranks, {asked.batch} x {asked.seq_len} tokens per rank, fsdp2\n")
    spent = slowest(__file__, asked)
    tokens = asked.ranks * asked.batch * asked.seq_len
    print("| ep | step, ms | tokens/s | step / ep 1 (95%) |\n|---|---|---|---|")
    for degree, seconds in spent.items():
        middle = np.median(seconds)
        beside = ratio([seconds], [spent["1"]], np.median)
        print(f"| {degree} | {middle * 1000:.1f} | {tokens / middle:,.0f} | {beside} |")


if __name__ == "__main__":
    main()
