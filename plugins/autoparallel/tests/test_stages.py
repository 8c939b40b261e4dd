"""Searches over layouts that divide the layers."""

import functools
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import yaml

from plait import REMAT, Cluster, PlaitError, planning
from plait.host import check, compose
from plait.parallel.assembly import assemble
from plait.testing import raises_about
from plait_autoparallel import stages
from plait_autoparallel.applied import config_under
from plait_autoparallel.candidates import Candidate, Priced
from plait_autoparallel.constraints import Constraints
from plait_autoparallel.file import Decision
from plait_autoparallel.solve import kinds_of

TINY = (
    "cluster=cpu", "model.dim=64", "model.n_layers=6", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=128",
    "train.seq_len=64", "train.global_batch_size=16", "validation.interval=0", "metrics.tensorboard=false",
    "launch.device=cpu",
)  # fmt: skip
ONLY = ("strategy=[autoparallel]", "strategy.autoparallel.strategies=[pipeline]")
NAMES = ("fsdp2", "pipeline", "tensor_parallel")
TIME, MEMORY = 0.15, 0.15  # how far an estimate may be from the plan, relative


def checked(*more, world=2):
    return check(compose([*more, *TINY]), world)


def planned(one):
    return yaml.safe_load(one.files["plan.yaml"])


@pytest.mark.slow
def test_stages_join_the_search_by_the_plugins_own_declaration():
    plan = planned(checked(*ONLY))
    assert plan["axes"] == {"pp": 2}
    assert plan["decision"]["strategies"]["pipeline"]["degree"] == 2
    assert plan["seconds"].keys() == {"step", "waiting for other stages"}
    assert {key for key in plan["bytes"] if key.startswith("at ")} == {
        "at rank 0 of the stages",
        "at rank 1 of the stages",
    }
    assert len(set(plan["decision"]["recompute"].values())) == 1


@pytest.mark.slow
def test_the_run_is_planned_as_the_search_said():
    one = checked(*ONLY)
    total = planning.planned_stages(one.config, 2, Cluster.of(one.config.cluster))
    assert planned(one)["seconds"]["step"] == pytest.approx(total.seconds, rel=1e-5)
    assert planned(one)["bytes"]["peak"] == round(total.peak)
    assert planned(one)["seconds"]["waiting for other stages"] == pytest.approx(total.bubble * total.seconds, rel=1e-5)


@pytest.mark.slow
def test_less_memory_recomputes_all_blocks_alike():
    free = planned(checked(*ONLY))
    less = planned(checked(*ONLY, f"strategy.autoparallel.memory={0.97 * free['bytes']['peak']:.0f}"))
    assert less["bytes"]["peak"] <= 0.97 * free["bytes"]["peak"]
    assert less["seconds"]["step"] > free["seconds"]["step"]
    with raises_about("strategy.autoparallel.memory", 1024.0, "at least"):
        checked(*ONLY, "strategy.autoparallel.memory=1024")


@pytest.mark.slow
def test_a_pipeline_that_the_user_named_stays_as_it_is():
    one = checked(
        "strategy=[autoparallel,pipeline]", "strategy.autoparallel.strategies=[]", "strategy.pipeline.schedule=gpipe"
    )
    assert one.config.strategy["pipeline"]["schedule"] == "gpipe"
    assert one.layout.count("layers") == 2
    assert planned(one)["axes"] == {"pp": 2}
    assert "pipeline" not in planned(one)["decision"]["strategies"]


def test_axes_that_blocks_do_not_wait_for_may_cross_nodes():
    from plait_autoparallel.search import _inside

    config = compose(["strategy=[]", *TINY])
    run = assemble(config, 4, device_type="cpu").run
    here: Any = Cluster.of(config.cluster)
    cluster = attrs.evolve(here, node=2)
    layouts, _ = planning.compositions(run, {n: s for n, s in planning.offering(run).items() if n in NAMES})
    inside = {tuple(sorted(large(c).items())) for c in layouts if _inside(c, cluster)}
    assert {(("pp", 4),), (("dp_shard", 4),), (("dp_replicate", 4),)} <= inside
    assert (("tp", 4),) not in inside


def large(composition):
    return {name: degree for name, degree in planning.degrees(composition.layout).items() if degree > 1}


@functools.cache  # for all modes of recomputation
def priced(world, samples):
    """(run, cluster, candidates that divide the layers)."""
    config = compose(["strategy=[]", *TINY])
    run = assemble(config, world, device_type="cpu").run
    cluster = Cluster.of(config.cluster)
    layouts, _ = planning.compositions(run, {n: s for n, s in planning.offering(run).items() if n in NAMES})
    cut = [i for i, one in enumerate(layouts) if one.divides]
    traced, _ = planning.traces(run, layouts, cut, {}, cluster.granularity)
    wanted = Constraints({}, {}, {}, run.spec, run.shapes, samples)
    found = []
    for i in cut:
        own = samples // layouts[i].layout.count("batch")
        for rows in (rows for rows in range(1, own + 1) if own % rows == 0):
            price = planning.price(traced[i], layouts[i].layout, cluster, rows)
            candidate = Candidate(layouts[i], rows, own // rows)
            found.append(Priced(candidate, traced[i], price, wanted.segments(traced[i][0])))
    return run, cluster, found


def both(run, cluster, one, mode):
    """(estimate, plan), or None if the strategy refuses so few micro-batches."""
    plans = stages.StageAnswers(run)
    if (plan := plans.of(one.candidate)) is None:
        return None
    layout = one.candidate.composition.layout
    share = plans.shares(one.pieces[0], layout, plan)
    estimate = planning.stage_total(one.price, plan, kinds_of(one.segments), mode, share, layout, cluster)
    decision = Decision(one.candidate.composition.strategies, one.candidate.rows, 16, dict.fromkeys(run.blocks, mode))
    config = config_under(run, decision, list(run.blocks))
    return estimate, planning.planned_stages(config, run.world_size, cluster)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])  # plugins/plan/tests/test_price.py has all
def test_estimates_are_near_the_plan(mode):
    run, cluster, found = priced(4, 16)
    seen = {}
    for one in found:
        key = str(large(one.candidate.composition)), str(one.candidate.composition.strategies["pipeline"])
        if one.candidate.micro >= 4 and key not in seen and (pair := both(run, cluster, one, mode)):
            seen[key] = pair
    assert len(seen) >= 6
    for key, (estimate, plan) in seen.items():
        assert estimate.seconds == pytest.approx(plan.seconds, rel=TIME), key
        assert estimate.peak == pytest.approx(plan.peak, rel=MEMORY), key
        assert estimate.bubble == pytest.approx(plan.bubble, abs=0.05), key


@pytest.mark.slow
def test_no_layout_of_stages_is_much_faster():
    """Only the best estimates are planned: here all are."""
    run, cluster, found = priced(2, 16)
    every = [pair[1] for one in found for mode in ("none", "full") if (pair := both(run, cluster, one, mode))]
    assert len(every) > 10
    for share in (1.1, 0.8, 0.6):
        capacity = share * min(every, key=lambda one: one.seconds).peak
        fit = [one.seconds for one in every if one.peak <= capacity]
        if fit:
            plan = planned(checked(*ONLY, f"strategy.autoparallel.memory={capacity:.0f}"))
            assert plan["seconds"]["step"] <= 1.02 * min(fit), share


def test_stages_recompute_only_as_every_block_may():
    segments = [SimpleNamespace(ways=dict.fromkeys(ways)) for ways in (REMAT, ("none", "full"), ("full",))]
    assert list(stages._modes(SimpleNamespace(segments=segments[:2]))) == ["none", "full"]
    assert list(stages._modes(SimpleNamespace(segments=segments))) == ["full"]


def estimates(monkeypatch, best=None, modes=("none",), **figures):
    """A search among candidates, if a rank has 100 bytes: (names of those that fit, (name, bytes) of those that do not,
    names of those that were planned, what it says, all that it found).

    figures: name -> (estimated seconds, estimated bytes, planned bytes, or None if its strategies do not go together).
    Full recomputation takes a second more, and half of the estimated bytes. best: seconds of a whole model.
    """
    asked = []

    def one(name):
        composition = SimpleNamespace(layout=None, strategies=name)
        candidate = SimpleNamespace(composition=composition, rows=1, order=lambda: name)
        segments = [SimpleNamespace(ways=dict.fromkeys(modes), blocks=["layers.0"], kind=0)]
        return SimpleNamespace(
            candidate=candidate, pieces=[None], price=name, segments=segments, least=figures[name][0]
        )

    def stage_total(price, plan, kinds, mode, *_):
        seconds, peak, _ = figures[price]
        return SimpleNamespace(seconds=seconds + (mode == "full"), peak=peak / (2 if mode == "full" else 1))

    def planned_stages(name, *_):
        asked.append(name)
        if figures[name][2] is None:
            raise PlaitError("they do not go together")
        return SimpleNamespace(seconds=figures[name][0], peak=figures[name][2], peaks=[figures[name][2]], bubble=0.5)

    monkeypatch.setattr(planning, "stage_total", stage_total)
    monkeypatch.setattr(planning, "planned_stages", planned_stages)
    monkeypatch.setattr(stages, "config_under", lambda run, decision, blocks: decision.strategies)
    monkeypatch.setattr(stages, "described", lambda candidate: candidate.composition.strategies)
    said: list[str] = []
    run: Any = SimpleNamespace(world_size=2, say=said.append)
    answers: Any = SimpleNamespace(of=lambda candidate: "plan", shares=lambda *_: [1.0])
    whole: Any = best and SimpleNamespace(mix=SimpleNamespace(total=SimpleNamespace(seconds=best)))
    found = stages.search(run, answers, [one(name) for name in figures], None, 100, 8, whole)
    fit = [scored.candidate.composition.strategies for scored in found.fit]
    return fit, [(short.candidate.composition.strategies, short.needs) for short in found.short], asked, said, found


def test_the_fastest_estimates_are_planned_until_two_fit(monkeypatch):
    fit, short, asked, _, found = estimates(monkeypatch, a=(1.0, 50, 60), b=(2.0, 50, 60), c=(3.0, 50, 60))
    assert (fit, short, asked) == (["a", "b"], [], ["a", "b"])
    assert (found.estimated, found.lost) == (3, float("inf"))


def test_a_plan_that_needs_more_than_its_estimate_leaves_out_estimates_as_tight(monkeypatch):
    """And one that needs too much by its estimate is not planned: the others are bound by memory."""
    given = {"a": (1.0, 120, 120), "b": (2.0, 80, 160), "c": (3.0, 60, 70), "d": (4.0, 40, None), "e": (5.0, 50, 60)}
    fit, short, asked, said, found = estimates(monkeypatch, **given)
    assert (fit, asked) == (["e"], ["b", "d", "e"])
    assert short == [("a", 120), ("b", 160)]
    assert said == ["autoparallel: d is left out: they do not go together"]
    assert found.lost == 1.0
    assert found.estimated == 4


def test_no_estimate_is_planned_that_is_slower_than_a_whole_model(monkeypatch):
    """By more than it may be wrong."""
    fit, _, asked, _, found = estimates(monkeypatch, best=1.0, a=(1.09, 50, 60), b=(1.11, 50, 60))
    assert (fit, asked, found.estimated) == (["a"], ["a"], 1)


def test_few_estimates_are_planned_if_none_fits(monkeypatch):
    given = {name: (place, 90 / 2**place, 101) for place, name in enumerate("abcdefgh")}
    _, short, asked, _, found = estimates(monkeypatch, **given)
    assert found.estimated == 8
    assert len(asked) == len(short) == 5


def test_all_blocks_recompute_if_memory_takes_that(monkeypatch):
    fit, short, _, _, found = estimates(monkeypatch, modes=("none", "full"), a=(1.0, 150, 80), b=(3.0, 60, 70))
    assert (fit, short, found.lost) == (["a", "b"], [], 1.0)
    assert [(one.mix.modes, one.mix.bound) for one in found.fit] == [(("full",), True), (("none",), False)]
