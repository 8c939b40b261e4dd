"""Training runs that others published, beside their plans: python benchmarks/published.py [--few] [PART OF A NAME...]

--few: trace few blocks for the memory too. With parts of names, only rows that have one of them are planned.

One constant is fitted for each kind of machine, on one row: the share of the peak that products of matrices reach. All
other rows are judged by it. Shares of memory and links are the middle of the shipped clusters'.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import attrs
from machine import about, nothing_kept

GIB = 2**30
TITAN = "https://github.com/pytorch/torchtitan/blob/main/"
JUN25 = TITAN + "benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
DEC24 = TITAN + "benchmarks/llama3_h100_202412_torchtitan.md"
AUG24 = TITAN + "docs/performance.md"  # as of 2024; later versions lead to the page above

# Grand Teton's H100 has 96 GB of HBM2e at 2.4 TB/s, and ran at 500 W of 700.
TETON = ["cluster=h100", "cluster.memory=96e9", "cluster.bandwidth=2.4e12"]
FSDP = ["strategy=[fsdp2]"]
TP8 = ["strategy=[tensor_parallel,fsdp2]", "strategy.tensor_parallel.degree=8"]
# For inductor a plan takes inductor's graphs, which do not follow torchtitan's choice of what is recomputed.
COMPILED = ["compile.enabled=true", "compile.backend=aot_eager"]
LLAMA2_13B = [
    *("model=llama3_8b", "model.dim=5120", "model.n_layers=40", "model.n_heads=40", "model.n_kv_heads=40"),
    *("model.ffn_dim=13824", "model.vocab_size=32000", "train.seq_len=4096"),
]
LLAMA2_70B = ["model=llama3_70b", "model.vocab_size=32000", "train.seq_len=4096"]


@attrs.frozen
class Published:
    """One run. tokens: per second and GPU. memory: GiB that torch had reserved, if published. fitted: whether the
    constant of its machine is fitted on it."""

    name: str
    source: str
    world: int
    overrides: list[str]
    tokens: float
    memory: float | None = None
    fitted: bool = False

    def cluster(self, config: Any) -> Any:
        from plait.contract.cluster import Cluster

        return Cluster.of(config.cluster)


def _8b(batch: int) -> list[str]:
    return ["model=llama3_8b", *FSDP, f"train.local_batch_size={batch}", "remat.mode=selective"]


ROWS = [
    Published("8B, 8 H100, FSDP", DEC24, 8, [*TETON, *_8b(2)], 5762, 82.4, fitted=True),
    Published("8B, 128 H100, FSDP", DEC24, 128, [*TETON, *_8b(2)], 5605, 67.0),
    Published(
        "405B, 128 H100, TP 8 x FSDP 16, compiled", AUG24, 128,
        [*TETON, *TP8, "model=llama3_405b", "train.local_batch_size=2", "remat.mode=full", *COMPILED], 109,
    ),
    Published("8B, 8 H100, FSDP, compiled", DEC24, 8, [*TETON, *_8b(2), *COMPILED], 6667, 77.0),
    Published("8B, 128 H100, FSDP, compiled", DEC24, 128, [*TETON, *_8b(2), *COMPILED], 6514, 62.0),
    Published(
        "8B, 64 H100, TP 8 x FSDP 8, compiled", JUN25, 64,
        [*TETON, *TP8, "model=llama3_8b", "train.local_batch_size=12", "remat.mode=selective", *COMPILED], 4378,
    ),
    Published(
        "70B, 256 H100, TP 8 x FSDP 32, compiled", JUN25, 256,
        [*TETON, *TP8, "model=llama3_70b", "train.local_batch_size=16", "remat.mode=full", *COMPILED], 597.3,
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
PRODUCTS = 7  # of matrices in a block of Llama
COMMON = ["train.seq_len=8192", "precision.param=bfloat16", "validation.interval=0"]


@contextlib.contextmanager
def every_second_product_recomputed(compiled: bool) -> Iterator[None]:
    """What torchtitan's "selective op" does: Plait's `remat.mode=selective` keeps all products.

    compiled: a compiler keeps only what backward reads, and nothing reads a block's last product, the feed-forward's.
    """
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    from plait.parallel import compile as blocks

    plain = blocks._contexts
    recomputed = {2, 4, 6, *([PRODUCTS] if compiled else [])}

    def contexts() -> list[Any]:
        seen = {False: 0, True: 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op is torch.ops.aten.mm.default:
                seen[ctx.is_recompute] += 1
                if seen[ctx.is_recompute] in recomputed:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE

        with mock.patch.object(blocks, "_policy", policy):
            return plain()

    with mock.patch.object(blocks, "_contexts", contexts):
        yield


@contextlib.contextmanager
def ends_with_the_root() -> Iterator[None]:
    """What torchtitan did until July 2025: only blocks are units of FSDP2. The embedding, the last norm and the head
    stay with the root, which keeps them gathered and sums their gradients together when backward ends."""
    from plait.contract.model_spec import ModelSpec

    none = mock.Mock(return_value={})
    with mock.patch.object(ModelSpec, "before_of", none), mock.patch.object(ModelSpec, "after_of", none):
        yield


@contextlib.contextmanager
def composed_norms() -> Iterator[None]:
    """What torch before 2.9 did on a GPU too, as in all of these runs: RMSNorm is six operators."""
    import torch.nn.functional as F

    from plait_plan.tracing import kernels

    with mock.patch.object(kernels, "rms_norm", F.rms_norm):
        yield


def seconds(found: Any, cluster: Any, products: float) -> float:
    """Seconds of a step if products reach this share, other shares are the middle ones, and collectives overlap."""
    from plait.contract.cluster import Achieved
    from plait_plan.roofline import spend

    middle = {name: sum(getattr(cluster.achieved, name)) / 2 for name in ("memory", "links")}
    one = attrs.evolve(
        cluster, achieved=Achieved([products] * 2, *([middle[name]] * 2 for name in ("memory", "links")))
    )
    return float(found.sum(lambda trace: spend(trace, one, best=True).step))


def fitted(found: Any, cluster: Any, wanted: float) -> float:
    """The share of the products' peak at which the step takes `wanted` seconds; between 0.05 and 1."""
    low, high = 0.05, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(found, cluster, middle) > wanted else (low, middle)
    return (low + high) / 2


@contextlib.contextmanager
def as_torchtitan(compiled: bool) -> Iterator[None]:
    """Plans are of what torchtitan did where Plait does otherwise."""
    with nothing_kept(), every_second_product_recomputed(compiled), ends_with_the_root(), composed_norms():
        yield


def planned(row: Published, every: bool) -> Any:
    """(config, plan, what was traced) of a row. every: trace all blocks, which the gaps in reserved memory need."""
    from plait.host import check, compose
    from plait_plan.engine import plan, plannable, step_of

    config = compose([*COMMON, *row.overrides])
    with as_torchtitan(config.compile.enabled):
        one = plan(config, row.world, every=every)
        checked = check(plannable(config, []), row.world)
        found = step_of(checked.config, checked.assembly, 0, row.cluster(config), every, config.compile.enabled)
    return config, one, found


def errors(row: Published, every: bool = True) -> tuple[float, float]:
    """Of the memory that the plan of a row has torch reserve: with expandable segments, and with plain ones."""
    assert row.memory is not None
    expandable, plain = (size / GIB / row.memory - 1 for size in planned(row, every)[1].memory.reserved)
    return expandable, plain


def main(parts: list[str], few: bool) -> None:
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    print(f"{about()}\n")
    print("| run | published, tokens/s and GPU | plan's band | plan, fitted | error ", end="")
    print("| published, GiB reserved | plan, allocated | reserved, expandable | error | reserved, segments | error |")
    print("|---" * 11 + "|")
    shares: dict[str, float] = {}
    for row in (r for r in ROWS if r.fitted or not parts or any(part in r.name for part in parts)):
        config, one, found = planned(row, row.memory is not None and not few)
        cluster, each = row.cluster(config), one.tokens / row.world
        if row.fitted:
            shares[cluster.name] = fitted(found, cluster, each / row.tokens)
        point = each / seconds(found, cluster, shares[cluster.name])
        low, high = (t / row.world for t in one.time.tokens_per_second)
        error = f"fitted ({shares[cluster.name]:.3f})" if row.fitted else f"{point / row.tokens - 1:+.1%}"
        memory = ["", f"{one.memory.peak / GIB:.1f}"]
        for size in one.memory.reserved if row.memory is not None else ():
            memory[0] = f"{row.memory:.1f}"
            memory += [f"{size / GIB:.1f}", f"{size / GIB / row.memory - 1:+.1%}"]
        print(
            f"| [{row.name}]({row.source}) | {row.tokens:,.0f} | {low:,.0f} to {high:,.0f} | {point:,.0f} "
            f"| {error} | {' | '.join([*memory, *[''] * (6 - len(memory))])} |",
            flush=True,
        )


if __name__ == "__main__":
    main([a for a in sys.argv[1:] if a != "--few"], "--few" in sys.argv)
