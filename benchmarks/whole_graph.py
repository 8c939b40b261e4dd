"""The cost or gain of one graph: python benchmarks/whole_graph.py [--cycles N] [--model NAME] [--backends ...]

Tokens per second of simplefsdp (the whole model in one graph, its collectives scheduled) and fsdp2 (block by block),
each without a compiler, with aot_eager and with inductor. All run in the same processes and take turns, one step each,
so that a slow minute slows all. A step takes as long as its slowest rank. The first step compiles and does not count.
`--model 'llama3_debug model.n_layers=2'` takes overrides too. For peak memory and models of billions on a GPU:
throughput.py 'strategy=[simplefsdp]'.
"""

from collections.abc import Sequence

import numpy as np
import torch
from machine import about
from overhead import ratio
from turns import arguments, as_rank, slowest, training_step

BACKENDS = ("none", "aot_eager", "inductor")


def as_rank_of(model: str, backends: Sequence[str], cycles: int, warm_up: int, batch: int, seq_len: int) -> None:
    import logging

    import plait
    from plait.host import compose
    from plait.strategies.registry import create

    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    config = compose([*f"model={model}".split(), "strategy=[fsdp2]"]).plain()
    steps = {}
    for backend in backends:
        for name in ("fsdp2", "simplefsdp"):
            compile = plait.Compile(backend != "none", backend) if backend != "none" else plait.Compile()
            step = training_step(config, [create(name, {})], batch, seq_len, compile=compile)
            steps[f"{name} {backend}"] = step
            step()  # compiles by itself: what torch has compiled so far must not change what comes later
    as_rank(steps, cycles, warm_up)


def main() -> None:
    asked = arguments(__doc__, "llama3_debug", 2, BACKENDS)
    if asked.as_rank:
        return as_rank_of(asked.model, asked.backends, asked.cycles, asked.warm_up, asked.batch, asked.seq_len)
    print(f"{about()}\n{'' if torch.cuda.is_available() else 'NOT MEASURED ON A GPU'}\n")
    print(f"## {asked.model}, {asked.ranks} ranks, {asked.batch} x {asked.seq_len} tokens per rank, float32\n")
    spent = slowest(__file__, asked)
    tokens = asked.ranks * asked.batch * asked.seq_len
    print("| compiled with | fsdp2, tokens/s | simplefsdp, tokens/s | simplefsdp / fsdp2 (95%) |\n|---|---|---|---|")
    for backend in asked.backends:
        theirs, ours = spent[f"fsdp2 {backend}"], spent[f"simplefsdp {backend}"]
        rates = [f"{tokens / np.median(seconds):,.0f}" for seconds in (theirs, ours)]
        print(f"| {backend} | {' | '.join(rates)} | {ratio([theirs], [ours], np.median)} |")


if __name__ == "__main__":
    main()
