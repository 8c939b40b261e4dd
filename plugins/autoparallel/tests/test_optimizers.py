"""The search under an optimizer of whole matrices: what it does depends on the layout, and on all blocks at once."""

from typing import Any

import attrs
import pytest

from plait import REMAT, Cluster, planning
from plait.host import assemble, compose
from plait_autoparallel.applied import config_under
from plait_autoparallel.constraints import Constraints
from plait_autoparallel.decide import decision_of
from plait_autoparallel.search import search
from plait_plan.engine import plan

SMALL = [
    "strategy=[]", "cluster=h100", "model.dim=64", "model.n_layers=6", "model.n_heads=4", "model.n_kv_heads=2",
    "model.ffn_dim=128", "train.seq_len=64", "train.local_batch_size=2", "launch.device=cpu", "validation.interval=0",
]  # fmt: skip
WORLD, SAMPLES, MEMORY = 4, 8, 1e12


def asked(optimizer):
    """(the run, its layouts, why others cannot take part, constraints)."""
    config = compose([*SMALL, f"optimizer={optimizer}"])
    run = assemble(config, WORLD, device_type="cpu").run
    layouts, reasons = planning.compositions(run, {n: s for n, s in planning.offering(run).items() if n == "fsdp2"})
    return run, layouts, reasons, Constraints({}, {}, {}, run.spec, run.shapes, SAMPLES)


def nodes(run):
    """Two nodes of two ranks, whose links take no time but that for bytes."""
    cluster: Any = Cluster.of(run.config.cluster)
    inside, between = attrs.evolve(cluster.inside, latency=0.0), attrs.evolve(cluster.between, latency=0.0)
    return attrs.evolve(cluster, node=2, launch=0.0, inside=inside, between=attrs.evolve(between, bandwidth=2e11))


@pytest.mark.slow
def test_it_chooses_for_the_optimizer():
    """With copies of shards every rank gets a larger part of each result of Muon back than with shards alone."""
    chosen = {}
    for optimizer in ("adamw", "muon"):
        run, layouts, reasons, wanted = asked(optimizer)
        found = search(run, layouts, reasons, nodes(run), MEMORY, wanted)
        chosen[optimizer] = planning.degrees(found.best.candidate.composition.layout)
    assert chosen == {
        "adamw": {"dp_replicate": 2, "dp_shard": 2},
        "muon": {"dp_replicate": 1, "dp_shard": 4},
    }


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "soap"])
def test_no_layout_is_better_and_a_plan_says_the_same(optimizer):
    run, layouts, reasons, wanted = asked(optimizer)
    cluster = Cluster.of(run.config.cluster)
    found = search(run, layouts, reasons, cluster, MEMORY, wanted)
    traced, _ = planning.traces(run, layouts, list(range(len(layouts))), {}, cluster.granularity)
    seconds = []
    for i, composition in enumerate(layouts):
        for rows, micro in wanted.batches(composition.layout):
            price = planning.price(traced[i], composition.layout, cluster, rows)
            own = [planning.put_together(price, [0] * 6, [mode] * 6, micro).seconds for mode in REMAT]
            seconds.append(min(own))
    total = found.best.mix.total
    assert total.seconds == pytest.approx(min(seconds), rel=1e-9)
    whole = plan(config_under(run, decision_of(found, SAMPLES), list(run.blocks)), WORLD)
    assert total.seconds == pytest.approx(sum(whole.time.step) / 2, rel=0.03)
    assert total.peak == pytest.approx(whole.memory.peak, rel=0.05)
