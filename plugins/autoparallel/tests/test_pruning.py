"""What is left out of a search, and what is read from disk, changes no plan."""

import math
import signal
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import numpy as np
import pytest

from plait import Cluster, MeshAxis, planning
from plait.contract.axes import join_axes
from plait.host import compose
from plait.parallel.assembly import assemble
from plait_autoparallel.bounds import Bounds, by_core
from plait_autoparallel.constraints import Constraints
from plait_autoparallel.search import search
from plait_autoparallel.solve import bound, solve
from plait_autoparallel.solve import traced as with_modes
from plait_autoparallel.watch import Watch
from plait_plan.memo import Memo
from plait_plan.pricing import pieces, traces
from plait_plan.tracing.recorder import Operator

SMALL = ("model.n_layers=2", "model.dim=32", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=64")
COMMON = ("strategy=[]", "cluster=cpu", "train.seq_len=64", "train.local_batch_size=2", "launch.device=cpu")
EVERY = ("fsdp2", "tensor_parallel", "expert_parallel", "pipeline")


class Searched:
    """Searches for one model on one number of ranks."""

    def __init__(self, world, names, *more):
        config = compose([*COMMON, *more])
        self.run = assemble(config, world, device_type="cpu").run
        self.cluster = Cluster.of(config.cluster)
        offered = {n: s for n, s in planning.offering(self.run).items() if n in names}
        self.layouts, self.reasons = planning.compositions(self.run, offered)
        self.wanted = Constraints({}, {}, {}, self.run.spec, self.run.shapes, 2 * world)

    def __call__(self, capacity=1e12, watch=None, prune=True, prices=None):
        given = self.run, self.layouts, self.reasons, self.cluster, capacity, self.wanted
        return search(*given, watch=watch, prune=prune, prices=prices)


def key(found):
    return found.best.key(), found.best.mix.modes, found.best.mix.total.moments


def forget(monkeypatch):
    """As in another process."""
    for module in (pieces, traces):
        monkeypatch.setattr(module, "PIECES", Memo(512))


def test_a_further_search_computes_no_price_of_a_layout_again():
    searched, prices = Searched(2, ("fsdp2",), *SMALL), {}
    with mock.patch.object(planning, "price", wraps=planning.price) as price:
        alone = searched(prices=prices)
        count, known = price.call_count, len(prices)
        again = searched(prices=prices)
    assert key(alone) == key(again)
    assert len(prices) == known > 0
    assert price.call_count == 2 * count - known


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "model"),
    [
        (("fsdp2", "zero", "tensor_parallel"), (*SMALL, "precision.param=bfloat16")),
        (("fsdp2", "expert_parallel"), ("model=qwen3_moe_debug", "model.n_layers=2")),
    ],
)
def test_no_family_takes_less_than_any_other_of_its_core_says(names, model):
    searched = Searched(4, names, *model, "cluster=h100")
    given = searched.run, searched.layouts, list(range(len(searched.layouts))), {}, searched.cluster.granularity
    traced = {i: family.pieces for family in planning.families(*given, first=True) for i in family.members}
    compared = 0
    for families in by_core(searched.layouts, traced, planning.made_of(searched.run, searched.layouts)):
        bounds = [Bounds(searched.layouts, searched.cluster, searched.wanted, None) for _ in families]
        for own, family in zip(bounds, families, strict=True):
            own.learn({i: traced[i] for i in family})
        for i in (i for family in families for i in family):
            layout, segments = searched.layouts[i].layout, searched.wanted.segments(traced[i][0])
            for number, (rows, micro) in enumerate(searched.wanted.batches(layout)):
                price = planning.price(traced[i], layout, searched.cluster, rows)
                least = bound(price, with_modes(segments, price), micro)
                for own in bounds:
                    said = list(own.candidates(i))[number]
                    assert 0 < bound(said.price, said.segments, micro) <= least * (1 + 1e-9), searched.layouts[i].text()
                    compared += 1
    assert compared > 10


def test_the_first_families_of_all_cores_need_few_traces():
    heads = ("model.n_heads=8", "model.n_kv_heads=8", "model.dim=256", "model.n_layers=2")
    searched = Searched(32, ("fsdp2", "tensor_parallel"), *heads)
    made_of = planning.made_of(searched.run, searched.layouts)
    cores = by_core(searched.layouts, range(len(searched.layouts)), made_of)
    assert len(cores) == 4  # no tensor parallelism, and that of 2, 4 and 8 ranks
    assert len({i for families in cores for i in made_of[families[0][0]]}) == 3  # 4 ranks lie between


@pytest.mark.slow
def test_what_all_data_ranks_exchange_is_known_whatever_a_strategy_calls_their_axis():
    searched = Searched(4, ("fsdp2", "zero", "expert_parallel"), "model=qwen3_moe_debug", "model.n_layers=2")
    wide = {"expert_parallel": {"degree": 4}}
    core = [i for i, one in enumerate(searched.layouts) if wide.items() <= one.strategies.items()]
    others = {i: next(n for n in searched.layouts[i].strategies if n not in wide) for i in core}
    chosen = [next(i for i in core if others[i] == name) for name in ("fsdp2", "zero")]
    families = planning.families(searched.run, searched.layouts, chosen, {}, searched.cluster.granularity, first=True)
    traced = {i: family.pieces for family in families for i in family.members}
    said = []
    for i in chosen:
        own = Bounds(searched.layouts, searched.cluster, searched.wanted, None)
        own.learn({i: traced[i]})
        said.append([one.least for j in chosen for one in own.candidates(j)])
    assert said[0] == pytest.approx(said[1], rel=1e-3)


def test_a_core_knows_what_ranks_of_another_layout_exchange_by_the_names_that_their_axes_have_there():
    """All that split the batch. Axes that split sequences or tensors keep their names."""

    def layout(axes):
        rest = [MeshAxis("cp", 3, "sequence"), MeshAxis("tp", 2)]
        given = [*(MeshAxis(name, degree, "batch") for name, degree in axes.items()), *rest]
        return join_axes([("made", given)], math.prod(axis.degree for axis in given))

    def names_in(here):
        return own._here(SimpleNamespace(core="core", pieces=layout(here)))[1]

    sends = [Operator("forward", 0, "", "c10d::op", 0, 0, "", "all_reduce", axis, 8, batch=8) for axis in
             ("dp_replicate*dp_shard", "dp_shard", "cp", "tp", "dp_replicate*dp_shard*tp")]  # fmt: skip
    given, sizes, levels = layout({"dp_replicate": 2, "dp_shard": 4}), np.ones((5, 3)), np.ones((5, 9))
    traced = pieces.Pieces(given, [], {}, [], sends, sizes, sizes, levels, levels, {}, ())
    layouts: Any = [SimpleNamespace(core="core")]
    own = Bounds(layouts, None, None, None)
    own.learn({0: [traced]})
    rest = ["cp", "dp_replicate*dp_shard*tp", "dp_shard", "tp"]
    assert names_in({"zero": 8}) == sorted(["zero", *rest])
    apart = sorted(["dp_replicate*dp_shard", *rest])
    assert names_in({"dp_replicate": 4, "dp_shard": 2}) == apart
    assert names_in({"zero": 4}) == apart  # too few ranks


CASES = [
    pytest.param(2, ("fsdp2",), SMALL, id="small"),
    *(
        pytest.param(4, EVERY, (f"model={name}",), id=name, marks=(pytest.mark.slow, pytest.mark.timeout(1200)))
        for name in ("llama3_debug", "qwen3_debug", "deepseek_v3_debug", "qwen3_moe_debug")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "names", "more"), CASES)
def test_the_plan_is_that_of_the_full_search(world, names, more, tmp_path, monkeypatch):
    """Cold, from disk, and with nothing left out; with memory for any plan, and with too little for the fastest."""
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    forget(monkeypatch)
    made, plain = [], pieces._trace
    monkeypatch.setattr(pieces, "_trace", lambda *given: made.append(given) or plain(*given))
    monkeypatch.setattr("plait_plan.cores.cores", lambda: 1)
    searched = Searched(world, names, *more)
    cold = searched()
    pruned = len(made)
    whole = searched(prune=False)
    assert key(cold) == key(whole)
    assert pruned < len(made)
    tight = 0.8 * whole.best.mix.total.peak
    assert key(searched(tight)) == key(searched(tight, prune=False))
    forget(monkeypatch)
    monkeypatch.setattr(pieces, "_trace", None)
    assert key(searched()) == key(cold)
    assert key(searched(prune=False)) == key(cold)


@pytest.mark.slow
def test_what_cannot_hold_its_parameters_is_not_traced(tmp_path, monkeypatch):
    """Copies of all parameters, told by the trace of a layout that divides them."""
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    monkeypatch.setattr("plait_plan.cores.cores", lambda: 1)
    forget(monkeypatch)
    made, plain = [], pieces._trace
    monkeypatch.setattr(pieces, "_trace", lambda *given: made.append(given[2]["fsdp2"]) or plain(*given))
    searched = Searched(4, ("fsdp2",), *SMALL, "model.dim=128", "train.seq_len=8")
    whole = searched(prune=False)
    every = {one.candidate.composition.strategies["fsdp2"]["shard"]: one for one in (whole.best, *whole.others)}
    capacity = 0.99 * every[1].price.static
    assert every[4].mix.total.peak < capacity
    made.clear()
    forget(monkeypatch)
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "another"))
    found = searched(capacity)
    assert made
    assert all(options["shard"] > 1 for options in made)
    assert key(found) == key(searched(capacity, prune=False))
    assert found.slower == 2


class Over(Watch):
    """As if the search's seconds were over after its first family."""

    def see(self, *given):
        self._start = float("-inf")
        super().see(*given)


def pressed(line):
    if "best so far" in line:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("watch", "said"),
    [
        (Over(1.0), "ended by strategy.autoparallel.seconds=1, when 1 of about "),
        (Watch(tell=pressed), "ended by Ctrl-C, when "),
    ],
)
def test_a_search_that_ends_early_has_the_best_of_what_it_saw_and_says_so(watch, said, monkeypatch):
    monkeypatch.setattr("plait_plan.cores.cores", lambda: 1)
    forget(monkeypatch)
    monkeypatch.setattr("plait_plan.pricing.traces.kept", lambda *_: None)
    left = signal.signal(signal.SIGINT, signal.default_int_handler)  # an earlier test may have left another
    try:
        found = Searched(2, ("fsdp2",), *SMALL)(watch=watch)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, left or signal.default_int_handler)
    assert found.ended.startswith(said)
    assert found.hand
    assert found.best.key() <= min(one.key() for one in (*found.hand, *found.others))


def slowly(*given):
    """A mix that takes longer than what a person would try, as if the search ended before it solved a better one."""
    mix = solve(*given)
    assert mix is not None
    return attrs.evolve(mix, total=attrs.evolve(mix.total, seconds=10 * mix.total.seconds))


def test_a_search_that_ends_early_takes_what_it_had_by_hand(monkeypatch):
    monkeypatch.setattr("plait_plan.cores.cores", lambda: 1)
    monkeypatch.setattr("plait_autoparallel.standings.solve", slowly)
    forget(monkeypatch)
    monkeypatch.setattr("plait_plan.pricing.traces.kept", lambda *_: None)
    found = Searched(2, ("fsdp2",), *SMALL)(watch=Over(1.0))
    assert found.ended
    assert found.best is found.hand[0]


def test_after_ctrl_c_the_next_search_ends_with_its_first_plan(monkeypatch):
    monkeypatch.setattr("plait_autoparallel.watch.words", mock.MagicMock())
    left = signal.signal(signal.SIGINT, signal.default_int_handler)
    watch, plan = Watch(), mock.MagicMock()
    try:
        with watch.ending():
            watch.see(1, 9, True, plan)
            signal.raise_signal(signal.SIGINT)
        assert watch.ended.startswith("ended by Ctrl-C, when 1 of")
        with watch.ending():
            assert watch.ended == ""
            with pytest.raises(KeyboardInterrupt):  # it has no plan of its own yet
                signal.raise_signal(signal.SIGINT)
            watch.see(2, 9, True, None)
            watch.see(3, 9, False, plan)  # kept: took no time
            watch.see(4, 9, True, plan)
            watch.see(5, 9, True, plan)
        assert watch.ended.startswith("ended by Ctrl-C, when 4 of")
    finally:
        signal.signal(signal.SIGINT, left or signal.default_int_handler)
