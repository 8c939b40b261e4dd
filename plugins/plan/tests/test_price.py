"""A step put together of pieces costs what the same step costs if it is traced whole."""

import math
from typing import Any

import attrs
import pytest

from plait import Cluster
from plait.host import check, compose
from plait_plan.engine import plan, plannable
from plait_plan.pricing.optimizers import of_whole
from plait_plan.pricing.pieces import pieces
from plait_plan.pricing.price import BlockCost, Price, price, put_together
from plait_plan.values import KINDS

SMALL = [
    "model.n_layers=12", "train.seq_len=512", "train.local_batch_size=1", "validation.interval=0", "cluster=h100",
    "precision.param=bfloat16",
]  # fmt: skip
HSDP = ["strategy=[fsdp2]", "strategy.fsdp2.replicate=2"]
TENSOR = ["strategy=[tensor_parallel,fsdp2]", "strategy.fsdp2.replicate=2"]
COPIES = ["strategy=[tensor_parallel,fsdp2]", "strategy.fsdp2.replicate=4"]
DEEP = ["model=deepseek_v3_debug", "model.n_dense_layers=5"]
EXPERTS = ["strategy=[expert_parallel,fsdp2]", *DEEP]
MUON = ["strategy=[fsdp2]", "optimizer=muon"]

# What is traced, then runs whose step is put together of it.
CASES = {
    "hsdp": (HSDP, [[], ["remat.mode=full"], ["remat.mode=selective"], ["train.local_batch_size=4"],
                    ["strategy.fsdp2.replicate=1"], ["strategy.fsdp2.replicate=4"], ["train.global_batch_size=32"]]),
    "tensor": (TENSOR, [[], ["remat.mode=full"], ["strategy.fsdp2.replicate=1", "train.local_batch_size=2"]]),
    "one shard": (COPIES, [[], ["train.local_batch_size=2"]]),
    "experts": (EXPERTS, [[], ["remat.mode=full"], ["train.local_batch_size=4"]]),
    "muon": (MUON, [[], ["strategy.fsdp2.replicate=2"], ["strategy.fsdp2.replicate=4"], ["remat.mode=full"]]),
    "experts under muon": ([*EXPERTS, "optimizer=muon"], [[], ["train.local_batch_size=4"]]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_pieces_put_together_cost_what_the_whole_costs(case: str) -> None:
    base, others = CASES[case]
    first = check(plannable(compose([*SMALL, *base]), []), 8)
    cluster = Cluster.of(first.config.cluster)
    found = pieces(first.config, first.layout, first.config.strategy, cluster.granularity)
    kind_of = {fqn: kind for kind, group in enumerate(found[0].groups) for fqn in group.fqns}
    kinds = [kind_of[fqn] for fqn in sorted(kind_of, key=lambda fqn: int(fqn.split(".")[1]))]
    for more in others:
        node = compose([*SMALL, *base, *more])
        whole = plan(node, 8)
        run = check(plannable(node, []), 8)
        rows, samples = run.config.train.local_batch_size, run.config.train.global_batch_size
        micro = samples // run.layout.count("batch") // rows if samples else 1
        mode = run.config.remat.mode
        if found[-1].sends:
            dealt = of_whole(run.config, run.layout, run.config.strategy, cluster.granularity)
            found = [attrs.evolve(one, optimizer=dealt) for one in found]
        total = put_together(price(found, run.layout, cluster, rows), kinds, [mode] * len(kinds), micro)
        bound = 0.04 if samples else 0.03  # adding gradients hides sums of others, which pieces count as waited for
        assert total.seconds == pytest.approx(sum(whole.time.step) / 2, rel=bound), more
        assert total.peak == pytest.approx(whole.memory.peak, rel=0.05), more


def test_backward_of_a_block_has_its_own_gradients_beside_those_of_the_blocks_after_it() -> None:
    more = ["strategy=[]", "model.n_layers=5", "train.seq_len=8", "precision.param=float32", "train.local_batch_size=1"]
    run = check(plannable(compose([*SMALL, *more]), []), 1)
    cluster = Cluster.of(run.config.cluster)
    found = price(pieces(run.config, run.layout, {}, 1), run.layout, cluster, 1)
    (gradients,) = found.gradients
    for cost in found.blocks[0].values():
        assert gradients <= cost.backward <= 1.2 * gradients  # so few tokens are small beside them


@pytest.mark.slow
def test_what_a_rank_always_holds_is_its_parameters_the_optimizer_and_buffers() -> None:
    """The more so the balance of experts, which lies in buffers."""
    more = ["model=deepseek_v3_debug", "strategy=[]", "model.n_dense_layers=0", "model.n_layers=5", "train.seq_len=8"]
    run = check(plannable(compose([*SMALL, *more]), []), 1)
    cluster = Cluster.of(run.config.cluster)
    traced = pieces(run.config, run.layout, {}, 1)
    held = dict(zip(KINDS, traced[0].levels[0], strict=True))
    parameters = 4 * sum(math.prod(tensor.shape) for tensor in traced[0].tensors.values())
    assert held["parameters"] > parameters  # otherwise there are no buffers
    always = held["parameters"] + held["optimizer"]
    assert price(traced, run.layout, cluster, 1).static == pytest.approx(always, rel=1e-12)


@pytest.mark.slow
def test_more_shards_have_less_to_sum_over_copies() -> None:
    """Four ranks are traced. Eight have twice the shards, so each sums half as many gradients with its copies."""
    tiny = ["model.dim=32", "model.n_layers=5", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=64"]
    node = plannable(compose([*SMALL, *HSDP, *tiny, "train.seq_len=8"]), [])
    four, eight = (check(node, world) for world in (4, 8))
    cluster: Any = Cluster.of(eight.config.cluster)
    # Copies are on different nodes, and nothing hides what is sent between them.
    cluster = attrs.evolve(cluster, node=4, between=attrs.evolve(cluster.between, bandwidth=1e6))
    put, real = (
        price(pieces(run.config, run.layout, run.config.strategy, 1), eight.layout, cluster, 1) for run in (four, eight)
    )
    for mode, cost in real.blocks[0].items():
        assert put.blocks[0][mode].seconds == pytest.approx(cost.seconds, rel=1e-6)
    assert put.micro == pytest.approx(real.micro, rel=1e-6)


@pytest.mark.parametrize(("micro", "before"), [(1, 0.0), (3, 14.0)])
def test_each_moment_of_a_step_has_what_is_in_use_then(micro: int, before: float) -> None:
    """before: gradients of the micro-batches before."""
    block = BlockCost(seconds=3.0, kept=10.0, forward=14.0, backward=25.0, forward_seconds=1.0, exposed=(0.0, 0.0))
    made = Price(
        ({"none": block},), (7.0,), micro=0.5, step=8.0, adds=0.25, static=1000.0, base=100.0, head=40.0, tail=35.0,
        end=60.0, after=0.3,
    )  # fmt: skip
    total = put_together(made, [0, 0], ["none", "none"], micro)
    assert total.moments == {
        "forward": 1100 + before + 10 + 14,
        "head and loss": 1100 + before + 2 * 10 + 40,
        "backward": 1100 + before + 2 * 10 + 25,
        "after the first block's backward": 1100 + 2 * 7 + 35,
        "optimizer": 1000 + 60,
    }
    assert total.seconds == micro * (0.5 + 2 * 3) + 8 + (micro - 1) * 0.25
