"""Training runs that others published, beside their plans: python benchmarks/published.py

One constant is fitted for each kind of machine, on one row: the share of the peak that products of matrices reach. All
other rows are judged by it. Shares of memory and links are the middle of the shipped clusters'.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import attrs
from machine import about

TITAN = "https://github.com/pytorch/torchtitan/blob/main/"
DEC24 = TITAN + "benchmarks/llama3_h100_202412_torchtitan.md"
AUG24 = TITAN + "docs/performance.md"  # as of 2024; later versions lead to the page above

# Grand Teton's H100 has 96 GB of HBM2e at 2.4 TB/s, and ran at 500 W of 700.
TETON = ["cluster=h100", "cluster.memory=96e9", "cluster.bandwidth=2.4e12"]
FSDP = ["strategy=[fsdp2]"]
LLAMA2_13B = [
    *("model=llama3_8b", "model.dim=5120", "model.n_layers=40", "model.n_heads=40", "model.n_kv_heads=40"),
    *("model.ffn_dim=13824", "model.vocab_size=32000", "train.seq_len=4096"),
]
LLAMA2_70B = ["model=llama3_70b", "model.vocab_size=32000", "train.seq_len=4096"]


@attrs.frozen
class Published:
    """One run. tokens: a second and GPU. memory: GiB that torch had reserved, if told. fitted: whether the constant of
    its machine is fitted on it."""

    name: str
    source: str
    world: int
    overrides: list[str]
    tokens: float
    memory: float | None = None
    fitted: bool = False


def _8b(batch: int) -> list[str]:
    return ["model=llama3_8b", *FSDP, f"train.local_batch_size={batch}", "remat.mode=selective"]


ROWS = [
    Published("8B, 8 H100, FSDP", DEC24, 8, [*TETON, *_8b(2)], 5762, 82.4, fitted=True),
    Published("8B, 128 H100, FSDP", DEC24, 128, [*TETON, *_8b(2)], 5605, 67.0),
    Published(
        "405B, 128 H100, TP 8 x FSDP 16", AUG24, 128,
        [*TETON, "model=llama3_405b", "strategy=[tensor_parallel,fsdp2]", "strategy.tensor_parallel.degree=8",
         "train.local_batch_size=2", "remat.mode=full"], 109,
    ),
    Published("8B, 64 A100, FSDP", AUG24, 64, ["cluster=a100", *_8b(1)], 2973, fitted=True),
    Published(
        "70B, 64 A100, FSDP", AUG24, 64,
        ["cluster=a100", "model=llama3_70b", *FSDP, "train.local_batch_size=1", "remat.mode=full"], 331,
    ),
    Published(
        "Llama 2 13B, 64 A100, FSDP, nothing recomputed", AUG24, 64,
        ["cluster=a100", *LLAMA2_13B, *FSDP, "train.local_batch_size=2"], 2162,
    ),
    Published(
        "Llama 2 13B, 64 A100, FSDP, selective", AUG24, 64,
        ["cluster=a100", *LLAMA2_13B, *FSDP, "train.local_batch_size=2", "remat.mode=selective"], 1904,
    ),
    Published(
        "Llama 2 70B, 64 A100, FSDP", AUG24, 64,
        ["cluster=a100", *LLAMA2_70B, *FSDP, "train.local_batch_size=2", "remat.mode=full"], 353,
    ),
]  # fmt: skip
COMMON = ["train.seq_len=8192", "precision.param=bfloat16", "validation.interval=0"]


@contextlib.contextmanager
def every_second_product_recomputed() -> Iterator[None]:
    """What torchtitan's "selective op" does: Plait's `remat.mode=selective` keeps all products."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    from plait.parallel import compile as blocks

    plain = blocks._contexts

    def contexts() -> list[Any]:
        seen = {False: 0, True: 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op is torch.ops.aten.mm.default:
                seen[ctx.is_recompute] += 1
                if seen[ctx.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE

        with mock.patch.object(blocks, "_policy", policy):
            return plain()

    with mock.patch.object(blocks, "_contexts", contexts):
        yield


def seconds(found: Any, cluster: Any, products: float) -> float:
    """Of a step in which products reach this share, the other shares are the middle, and collectives overlap."""
    from plait.contract.cluster import Achieved
    from plait.plan.roofline import spend

    middle = {name: sum(getattr(cluster.achieved, name)) / 2 for name in ("memory", "links")}
    one = attrs.evolve(
        cluster, achieved=Achieved([products] * 2, *([middle[name]] * 2 for name in ("memory", "links")))
    )
    return float(found.sum(lambda trace: spend(trace, one, best=True).step))


def fitted(found: Any, cluster: Any, wanted: float) -> float:
    """The share of products' peak with which the step takes `wanted` seconds; between 0.05 and 1."""
    low, high = 0.05, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(found, cluster, middle) > wanted else (low, middle)
    return (low + high) / 2


def main() -> None:
    from plait.contract.cluster import cluster_of
    from plait.launch.check import check
    from plait.launch.compose import resolve
    from plait.plan.engine import _plannable, plan, step_of

    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    print(f"{about()}\n")
    print("| run | published, tokens/s and GPU | plan's band | plan, fitted | error | published, GiB | plan, GiB |")
    print("|---|---|---|---|---|---|---|")
    shares: dict[str, float] = {}
    with every_second_product_recomputed():
        for row in ROWS:
            node = resolve([*COMMON, *row.overrides])
            cluster = cluster_of(node["cluster"])
            assert cluster is not None
            one = plan(node, row.world)
            assert one.time is not None
            found = step_of(check(_plannable(node, []), row.world), 0, cluster)
            each = one.tokens / row.world
            if row.fitted:
                shares[cluster.name] = fitted(found, cluster, each / row.tokens)
            point = each / seconds(found, cluster, shares[cluster.name])
            low, high = (t / row.world for t in one.time.tokens_per_second)
            error = f"fitted ({shares[cluster.name]:.3f})" if row.fitted else f"{point / row.tokens - 1:+.1%}"
            memory = "" if row.memory is None else f"{row.memory:.1f}"
            print(
                f"| [{row.name}]({row.source}) | {row.tokens:,.0f} | {low:,.0f} to {high:,.0f} | {point:,.0f} "
                f"| {error} | {memory} | {one.memory.peak / 2**30:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
