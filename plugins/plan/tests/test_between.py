"""Steps put between traced degrees cost what they cost if they are traced."""

from typing import Any

import attrs
import numpy as np
import pytest

from plait import REMAT, Cluster, planning
from plait.host import compose
from plait.parallel.assembly import assemble
from plait_plan.pricing.between import between, ends
from plait_plan.pricing.pieces import Pieces, pieces
from plait_plan.pricing.space import representatives
from plait_plan.tracing.recorder import Operator

RUN = [
    "strategy=[]", "model.dim=512", "model.n_layers=5", "model.n_heads=8", "model.n_kv_heads=8", "model.ffn_dim=1024",
    "train.seq_len=512", "train.local_batch_size=8", "launch.device=cpu", "precision.param=bfloat16", "cluster=h100",
]  # fmt: skip


def composed(*more):
    run = assemble(compose([*RUN, *more]), 32, device_type="cpu").run
    offered = {n: s for n, s in planning.offering(run).items() if n in ("fsdp2", "tensor_parallel")}
    found, _ = planning.compositions(run, offered)
    return run, found, sorted(set(representatives(found).values()))


def serving(found):
    """Index of each layout with fsdp2 -> index of the one whose trace serves it."""
    return {i: by for i, by in representatives(found).items() if "fsdp2" in found[i].strategies}


def test_only_the_ends_are_traced():
    run, found, chosen = composed()
    mixes = ends(run, found, chosen)
    put = {i: mix for i, mix in mixes.items() if len(mix) > 1}
    assert {found[i].inner["tp"] for i in put} == {4}
    for mix in put.values():
        assert [found[j].inner["tp"] for _, j in mix] == [2, 8]
        assert sum(weight for weight, _ in mix) == pytest.approx(1)
        assert sum(weight / found[j].inner["tp"] for weight, j in mix) == pytest.approx(1 / 4)


def test_a_trace_with_shards_serves_no_layout_without_them():
    """FSDP2 casts the parameters of a block one by one if there is one shard: a fifth of a small model's step."""
    _, found, _ = composed()
    shards = {i: planning.degrees(found[i].pieces)["dp_shard"] for i in serving(found)}
    assert set(shards.values()) > {1}
    assert all((shards[i] == 1) == (shards[by] == 1) for i, by in serving(found).items())


def test_a_degree_that_shares_heads_is_no_end():
    run, found, chosen = composed("model.n_kv_heads=4")
    assert all(len(mix) == 1 for mix in ends(run, found, chosen).values())


def test_layouts_that_share_the_batch_otherwise_are_no_ends():
    """Sizes that depend on two degrees at once do not lie on one line."""
    run, found, _ = composed()

    def index(tp, copies):
        wanted = {"dp_replicate": copies, "dp_shard": 32 // tp // copies, "tp": tp}
        return next(i for i, one in enumerate(found) if planning.degrees(one.pieces) == wanted)

    low, high = index(2, 2), index(8, 2)
    for copies, count in ((2, 2), (4, 1)):
        one = index(4, copies)
        assert len(ends(run, found, [one, low, high])[one]) == count


def made(bytes_, levels):
    operators = [Operator("forward", 0, "", "aten::mm", 0, 1, "float32")] * 2
    arrays = (np.array(bytes_, dtype=float), np.zeros((2, 3)), np.array(levels, dtype=float), np.zeros((2, 4)))
    return [Pieces(None, [], {}, [("embed", "")] * 2, operators, *arrays, {}, ())]


def of_one(mix):
    found: Any = between(mix, "the layout")
    return found[0]


def test_figures_of_a_step_between_are_weighted_and_never_negative():
    one = made([[8, 0, 4], [1, 2, 3]], [[4, 0, 0, 0], [0, 0, 0, 8]])
    other = made([[0, 8, 4], [1, 2, 3]], [[0, 0, 0, 0], [16, 0, 0, 0]])
    found = of_one([(0.25, one), (0.75, other)])
    assert found.layout == "the layout"
    assert np.array_equal(found.fixed, [[2, 6, 4], [1, 2, 3]])
    assert np.array_equal(found.levels, [[1, 0, 0, 0], [12, 0, 0, 2]])
    beyond = of_one([(1.5, one), (-0.5, other)])
    assert np.array_equal(beyond.fixed, [[12, 0, 4], [1, 2, 3]])
    assert between([(0.5, one), (0.5, [attrs.evolve(other[0], parts=[("head", "")] * 2)])], "the layout") is None


@pytest.mark.slow
def test_a_step_between_is_the_traced_one():
    run, found, chosen = composed()
    cluster = Cluster.of(run.config.cluster)
    target, mix = next((i, mix) for i, mix in ends(run, found, chosen).items() if len(mix) > 1)

    def traced(i):
        return pieces(run.config, found[i].layout, found[i].strategies, cluster.granularity)

    put, real = between([(weight, traced(j)) for weight, j in mix], found[target].layout), traced(target)
    for rows in (1, 8):
        one, other = (planning.price(each, found[target].layout, cluster, rows) for each in (put, real))
        for mode in REMAT:
            a, b = (planning.put_together(each, [0] * 5, [mode] * 5, 1) for each in (one, other))
            assert a.seconds == pytest.approx(b.seconds, rel=2e-3)
            assert a.peak == pytest.approx(b.peak, rel=2e-3)
