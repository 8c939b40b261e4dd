"""The search against every layout, batch and mix of recomputation that there is, of models with two blocks."""

import itertools

import pytest

from plait import REMAT, Cluster, PlaitError, planning
from plait.host import compose
from plait.parallel.assembly import assemble
from plait_autoparallel.constraints import Constraints
from plait_autoparallel.search import search
from plait_autoparallel.solve import CLOSE

TINY = [
    "strategy=[]", "cluster=cpu", "model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2",
    "model.ffn_dim=64", "train.seq_len=64", "train.local_batch_size=2", "launch.device=cpu",
]  # fmt: skip
SHARES = (1.1, 0.9, 0.6, 0.4)  # of what the fastest plan needs


def every(run, layouts, cluster, samples):
    """(seconds, bytes) of each assignment."""
    traced, _ = planning.traces(run, layouts, list(range(len(layouts))), {}, cluster.granularity)
    for i, composition in enumerate(layouts):
        shares = composition.layout.count("batch")
        pieces = traced[i]
        kind = {fqn: i for i, group in enumerate(pieces[0].groups) for fqn in group.fqns}
        kinds = [kind[block] for block in run.blocks]
        own = samples // shares if samples % shares == 0 else 0
        for rows in [r for r in range(1, own + 1) if own % r == 0]:
            price = planning.price(pieces, composition.layout, cluster, rows)
            for modes in itertools.product(REMAT, repeat=len(kinds)):
                total = planning.put_together(price, kinds, list(modes), own // rows)
                yield total.seconds, total.peak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ["fsdp2"]),
        (4, ["fsdp2", "tensor_parallel"]),
        (8, ["fsdp2", "tensor_parallel"]),
    ],
)
def test_no_assignment_is_better(world, names):
    config = compose(TINY)
    run = assemble(config, world, device_type="cpu").run
    cluster = Cluster.of(config.cluster)
    layouts, reasons = planning.compositions(run, {n: s for n, s in planning.offering(run).items() if n in names})
    samples = 2 * world
    wanted = Constraints({}, {}, {}, run.spec, run.shapes, samples)
    everything = sorted(every(run, layouts, cluster, samples))
    for share in SHARES:
        capacity = share * everything[0][1]
        best = min((seconds for seconds, peak in everything if peak <= capacity), default=None)
        if best is None:
            with pytest.raises(PlaitError, match="no plan fits"):
                search(run, layouts, reasons, cluster, capacity, wanted)
            continue
        found = search(run, layouts, reasons, cluster, capacity, wanted)
        total = found.best.mix.total
        assert total.seconds <= best * (1 + 1e-9), share
        assert total.peak <= capacity * (1 + CLOSE)
        if share > 1:  # nothing is recomputed, so a person would have found it
            assert found.hand[0].key() == found.best.key()


@pytest.mark.slow
def test_fixing_axes_changes_no_price():
    """Otherwise a search with the axes that it found would find something faster."""
    config = compose(TINY)
    run = assemble(config, 2, device_type="cpu").run
    cluster = Cluster.of(config.cluster)
    layouts, reasons = planning.compositions(run, {n: s for n, s in planning.offering(run).items() if n == "fsdp2"})

    def searched(axes):
        found = search(run, layouts, reasons, cluster, 1e12, Constraints(axes, {}, {}, run.spec, run.shapes, 4))
        return {one.candidate.composition.text(): one.mix.total for one in (found.best, *found.others)}

    free = searched({})
    fixed = [searched({"dp_replicate": replicate}) for replicate in (1, 2)]
    assert all(fixed)
    assert {text: total for found in fixed for text, total in found.items()} == free
