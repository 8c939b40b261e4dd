"""What dividing Muon costs: python benchmarks/muon.py [--cycles N] [--model NAME] [--ranks N]

A step of Muon under fsdp2, beside its parts on the same ranks: Muon alone on as many matrices as the rank owns, with
AdamW on what it holds of the rest; and the all-to-alls of that step alone. All three take turns, a step each, so that a
slow minute slows all. A step takes as long as its slowest rank. No model runs: gradients are drawn once.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from machine import about
from overhead import ratio
from turns import arguments, as_rank, slowest

MODEL = {"model.dim": 256, "model.n_layers": 4, "model.ffn_dim": 768, "model.n_heads": 8, "model.n_kv_heads": 8}


def steps(name: str) -> dict[str, Callable[[], None]]:
    import torch.distributed as dist
    from torch import nn

    import plait
    from plait.compose.build import build_model
    from plait.host import compose
    from plait_fsdp2 import Fsdp2
    from plait_muon.muon import Muon

    options: Any = {"lr": 1e-3, "precision": "bfloat16" if torch.cuda.is_available() else "float32"}
    config = compose([f"model={name}", *(f"{key}={value}" for key, value in MODEL.items())])
    applied = plait.apply(*build_model(config.model), [Fsdp2()], seq_len=64)
    optimizer = Muon(applied.groups(), **options)
    for param in applied.parameters():
        param.grad = torch.randn_like(param)
    group, rank = dist.group.WORLD, dist.get_rank()
    routes = [route for deal in optimizer.deal(optimizer.trained()) for route in deal.routes]

    def alone(shapes: list[tuple[Any, ...]], logical: Any, block: str | None) -> dict[str, Any]:
        params = [nn.Parameter(torch.randn(shape, device=applied.device)) for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        of = {"names": [f"{block}{i}" for i in range(len(params))], "logical": [logical] * len(params)}
        units = [(1,) * len(logical)] * len(params)
        return {"params": params, **of, "block": [block] * len(params), "units": units, "mesh": None, "holders": None}

    owned = [each.shape for route in routes for each in route.own]
    held = [
        (param.to_local().numel(),) for own in optimizer.param_groups for param in own["params"] if not own["whole"]
    ]
    share = Muon([alone(owned, ("ffn", "embed"), "layers.0"), alone(held, ("embed",), None)], **options)
    dtype = getattr(torch, options["precision"])
    messages = [
        (torch.zeros(sum(counts[0]), dtype=dtype, device=applied.device), counts)
        for route in routes
        for counts, crosses in zip(route.counts, (route.there, route.back), strict=True)
        if crosses
    ]
    spent = torch.tensor([sum(math.prod(shape) for shape in owned)])
    dist.all_reduce(spent)
    whole = sum(p.numel() for own in optimizer.param_groups if own["whole"] for p in own["params"])
    assert int(spent) == whole, "each matrix is computed once in the world"

    def collectives() -> None:
        for sent, counts in messages:
            received = sent.new_empty(sum(counts[1]))
            dist.all_to_all_single(received, sent, counts[1], counts[0], group=group)

    if rank == 0:
        print(f"rank 0 owns {len(owned)} matrices; {len(messages)} all-to-alls", flush=True)
    return {"muon under fsdp2": optimizer.step, "its share alone": share.step, "its collectives alone": collectives}


def main() -> None:
    asked = arguments(__doc__, "llama3_debug", 2)
    if asked.as_rank:
        as_rank(steps(asked.model), asked.cycles, asked.warm_up)
        return
    print(about())
    spent = slowest(__file__, asked)
    for name, seconds in spent.items():
        print(f"{name}: {np.median(seconds) * 1000:.1f} ms")
    parts = spent["its share alone"] + spent["its collectives alone"]
    print("step / its parts:", ratio([spent["muon under fsdp2"]], [parts], np.median))


if __name__ == "__main__":
    main()
