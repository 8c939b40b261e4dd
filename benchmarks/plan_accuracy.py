"""The memory of runs that SimuMax published, beside plans: python benchmarks/plan_accuracy.py [PART OF A NAME...]

Source: github.com/MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md of version 1.2: 43 runs of Megatron-LM
on 8 B200, which simumax.csv lists. A run's name says its model, number of blocks (l), degrees (tp, cp, pp, ep), length
of a sequence and micro-batches (mbc). Runs that differ only in micro-batches share one measurement, and one line here.

A run of Plait holds other things than one of Megatron-LM, so the plan is of what Megatron-LM does, as far as it can be:
zero at stage 1 with all tensors in bfloat16, and kernels that keep what Megatron-LM's keep (`megatron_kernels`). To its
peak comes what Megatron-LM stores in float32: gradients (as much again as the plan's), and of the optimizer, which both
divide alike, the weights and two moments (twice as much again). Nothing is fitted.
"""

import contextlib
import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
from machine import about, nothing_kept

WORLD, GIB = 8, 2**30
DEEPSEEK = "model=deepseek_v3_671b model.n_dense_layers=1"
MODELS = {  # as SimuMax's scripts have them
    "llama3_70b": "model=llama3_70b",
    "llama3_405b": "model=llama3_405b model.n_kv_heads=16",
    "deepseekv3": DEEPSEEK,
    "deepseekv2": f"{DEEPSEEK} model.dim=5120 model.ffn_dim=12288 model.expert_ffn_dim=1536 model.n_experts=160 "
    "model.top_k=6 model.n_shared_experts=2 model.vocab_size=102400",
}
COMMON = (
    "precision.storage=bfloat16 precision.param=bfloat16 precision.reduce=bfloat16 loss.chunks=8 cluster=b200 "
    "validation.interval=0"
)
AXES = {"pp": "pipeline", "tp": "tensor_parallel", "cp": "context_parallel", "ep": "expert_parallel"}


@attrs.frozen
class Measured:
    """name: of the run with the fewest micro-batches. runs: how many share the measurement. gib, simumax: what torch
    allocated at most on a rank, and what SimuMax says."""

    name: str
    runs: int
    gib: float
    simumax: float


def measured() -> list[Measured]:
    found: dict[str, list[dict[str, str]]] = {}
    with (Path(__file__).parent / "simumax.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(re.sub("_mbc.*", "", row["run"]), []).append(row)
    return [Measured(r[0]["run"], len(r), float(r[0]["real_gib"]), float(r[0]["simumax_gib"])) for r in found.values()]


def overrides(name: str) -> list[str]:
    """The run of Plait that stands for it."""
    degrees = {axis: number(name, axis, 1) for axis in AXES}
    chosen = {axis: strategy for axis, strategy in AXES.items() if degrees[axis] > 1}
    data, blocks = WORLD // (degrees["pp"] * degrees["tp"] * degrees["cp"]), number(name, "l")
    stages = [blocks // degrees["pp"]] * degrees["pp"]
    return [
        *next(model for start, model in MODELS.items() if name.startswith(start)).split(),
        *COMMON.split(),
        f"model.n_layers={blocks}",
        f"train.seq_len={number(name, 'seq', 4096)}",
        "train.local_batch_size=1",
        f"train.global_batch_size={number(name, 'mbc') * data}",
        f"strategy=[{','.join([*chosen.values(), 'zero'])}]",
        "strategy.zero.stage=1",
        *(f"strategy.{strategy}.degree={degrees[axis]}" for axis, strategy in chosen.items()),
        *([f"strategy.pipeline.layers_per_stage={stages}"] if "pp" in chosen else []),
        *(["strategy.context_parallel.method=ulysses"] if "cp" in chosen else []),
    ]


def number(name: str, key: str, usual: int | None = None) -> int:
    match = re.search(rf"_{key}(\d+)", name)
    if match is None and usual is not None:
        return usual
    assert match, f"{name} does not say {key}"
    return int(match[1])


@contextlib.contextmanager
def megatron_kernels() -> Iterator[None]:
    """Inside, SwiGLU keeps its two inputs and makes one result; logits, which are never copied, become their gradient;
    and gradients are summed where they are stored."""
    import torch
    import torch.nn.functional as F

    from plait.ops import counts_for_products, grouped_linear
    from plait.parallel import chunked_loss
    from plait_models.moe import Experts
    from plait_models.swiglu import SwiGLU
    from plait_zero.sums import Sums

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: Any, up: Any) -> Any:
            ctx.save_for_backward(gate, up)
            return torch.add(gate, up)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            gate, up = ctx.saved_tensors
            return torch.add(gate, grad), torch.add(up, grad)

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x_ND: Any, labels_N: Any, weight_VD: Any, *rest: Any) -> Any:
            logits_NV = F.linear(x_ND, weight_VD)
            ctx.save_for_backward(x_ND, weight_VD, logits_NV)
            return logits_NV.sum(dtype=torch.float32)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x_ND, weight_VD, logits_NV = ctx.saved_tensors
            return logits_NV @ weight_VD, None, logits_NV.T @ x_ND, *[None] * 5

    def mlp(self: Any, x: Any) -> Any:
        return self.w2(Fused.apply(self.w1(x), self.w3(x)))

    def experts(self: Any, x: Any, counts: Any) -> Any:
        counts = counts_for_products(x, counts)
        fused = Fused.apply(grouped_linear(x, self.w1, counts), grouped_linear(x, self.w3, counts))
        return grouped_linear(fused, self.w2, counts)

    with (
        mock.patch.object(SwiGLU, "forward", mlp),
        mock.patch.object(Experts, "forward", experts),
        mock.patch.object(chunked_loss, "_ChunkedLoss", Loss),
        mock.patch.object(Sums, "_arrive", lambda sums, param, share, grad: grad),
    ):
        yield


@attrs.frozen
class Planned:
    """Bytes of the rank that holds most. peak: of the plan. more: what Megatron-LM stores in float32 beyond that."""

    peak: int
    more: int

    @property
    def gib(self) -> float:
        return (self.peak + self.more) / GIB


def planned(name: str) -> Planned:
    from plait.host import compose
    from plait_plan.engine import plan

    config = compose(overrides(name))
    with nothing_kept(), megatron_kernels():
        first = plan(config, WORLD)
        ranks = [stage.rank for stage in first.stages.ranks] if first.stages else [0]
        found = [plan(config, WORLD, rank).memory for rank in ranks]
    return max((Planned(m.peak, m.gradients + 2 * m.optimizer) for m in found), key=lambda one: one.gib)


def main(parts: list[str]) -> None:
    print(f"{about()}\n")
    heads = ["run", "runs", "measured, GiB", "SimuMax", "error", "plan's peak", "more in float32", "plan", "error"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for run in measured():
        if parts and not any(part in run.name for part in parts):
            continue
        one = planned(run.name)
        cells = [
            *(re.sub("_mbc.*", "", run.name), str(run.runs), f"{run.gib:.2f}"),
            *(f"{run.simumax:.2f}", f"{run.simumax / run.gib - 1:+.1%}"),
            *(f"{one.peak / GIB:.2f}", f"{one.more / GIB:.2f}", f"{one.gib:.2f}", f"{one.gib / run.gib - 1:+.1%}"),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
