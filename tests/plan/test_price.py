"""A step put together of pieces costs what the same step costs if it is traced whole."""

import math

import pytest

from plait.contract.cluster import cluster_of
from plait.launch.check import check
from plait.launch.compose import resolve
from plait.plan.engine import _plannable, plan
from plait.plan.pieces import pieces
from plait.plan.price import price, put_together
from plait.plan.values import KINDS

SMALL = [
    "model.n_layers=12", "train.seq_len=512", "train.local_batch_size=1", "validation.interval=0", "cluster=h100",
    "precision.param=bfloat16",
]  # fmt: skip
HSDP = ["strategy=[fsdp2]", "strategy.fsdp2.replicate=2"]
TENSOR = ["strategy=[tensor_parallel,fsdp2]", "strategy.fsdp2.replicate=2"]
DEEP = ["model=deepseek_v3_debug", "model.n_dense_layers=5"]
EXPERTS = ["strategy=[expert_parallel,fsdp2]", *DEEP]

# What is traced, then runs whose step is put together of it.
CASES = {
    "hsdp": (HSDP, [[], ["remat.mode=full"], ["remat.mode=selective"], ["train.local_batch_size=4"],
                    ["strategy.fsdp2.replicate=1"], ["strategy.fsdp2.replicate=4"], ["train.global_batch_size=32"]]),
    "tensor": (TENSOR, [[], ["remat.mode=full"], ["strategy.fsdp2.replicate=1", "train.local_batch_size=2"]]),
    "one shard": (TENSOR, [["strategy.fsdp2.replicate=4", "train.local_batch_size=2"]]),
    "experts": (EXPERTS, [[], ["remat.mode=full"], ["train.local_batch_size=4"]]),
}  # fmt: skip
# FSDP2 casts the parameters of a block one by one if it has one shard; the trace has several shards, and casts them
# together. That is as many bytes in fewer kernels, and kernels are all that such a small model waits for.
CLOSE = {"one shard": 0.15}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_pieces_put_together_cost_what_the_whole_costs(case: str) -> None:
    base, others = CASES[case]
    first = check(_plannable(resolve([*SMALL, *base]), []), 8)
    cluster = cluster_of(first.config.cluster)
    assert cluster is not None
    found = pieces(first.config, first.layout, first.config.strategy, cluster.granularity)
    kind_of = {fqn: kind for kind, group in enumerate(found[0].groups) for fqn in group.fqns}
    kinds = [kind_of[fqn] for fqn in sorted(kind_of, key=lambda fqn: int(fqn.split(".")[1]))]
    for more in others:
        node = resolve([*SMALL, *base, *more])
        whole = plan(node, 8)
        run = check(_plannable(node, []), 8)
        rows, samples = run.config.train.local_batch_size, run.config.train.global_batch_size
        micro = samples // run.layout.count("batch") // rows if samples else 1
        mode = run.config.remat.mode
        total = put_together(price(found, run.layout, cluster, rows), kinds, [mode] * len(kinds), micro)
        assert whole.time is not None
        assert total.seconds == pytest.approx(sum(whole.time.step) / 2, rel=CLOSE.get(case, 0.03)), more
        assert total.peak == pytest.approx(whole.memory.peak, rel=0.05), more


def test_backward_of_a_block_has_its_own_gradients_beside_those_of_the_blocks_after_it() -> None:
    more = ["strategy=[]", "model.n_layers=5", "train.seq_len=8", "precision.param=float32", "train.local_batch_size=1"]
    run = check(_plannable(resolve([*SMALL, *more]), []), 1)
    cluster = cluster_of(run.config.cluster)
    assert cluster is not None
    found = price(pieces(run.config, run.layout, {}, 1), run.layout, cluster, 1)
    (gradients,) = found.gradients
    for cost in found.blocks[0].values():
        assert gradients <= cost.backward <= 1.2 * gradients  # so few tokens are small beside them


def test_what_a_rank_always_holds_is_its_parameters_the_optimizer_and_buffers() -> None:
    """The more so the balance of experts, which lies in buffers."""
    more = ["model=deepseek_v3_debug", "strategy=[]", "model.n_dense_layers=0", "model.n_layers=5", "train.seq_len=8"]
    run = check(_plannable(resolve([*SMALL, *more]), []), 1)
    cluster = cluster_of(run.config.cluster)
    assert cluster is not None
    traced = pieces(run.config, run.layout, {}, 1)
    held = dict(zip(KINDS, traced[0].levels[0], strict=True))
    parameters = 4 * sum(math.prod(tensor.shape) for tensor in traced[0].tensors.values())
    assert held["parameters"] > parameters  # otherwise there are no buffers
    always = held["parameters"] + held["optimizer"]
    assert price(traced, run.layout, cluster, 1).static == pytest.approx(always, rel=1e-12)
