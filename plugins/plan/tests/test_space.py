"""Compositions: which one is traced for which others, and what the strategy that divides the layers is asked."""

import json
from typing import Any

import pytest

from plait import Choice, hookimpl, planning
from plait.host import build_model, compose
from plait.parallel.assembly import assemble
from plait_context_parallel import ContextParallel
from plait_pipeline import Pipeline
from plait_plan.pricing.between import ends
from plait_plan.pricing.space import representatives, stage_plan

SMALL = [
    "strategy=[]", "model.dim=32", "model.n_layers=2", "model.n_heads=8", "model.n_kv_heads=8", "model.ffn_dim=64",
    "train.seq_len=512", "launch.device=cpu",
]  # fmt: skip


def composed(world: int, *names: str) -> tuple[Any, list[planning.Composition]]:
    run = assemble(compose(SMALL), world, device_type="cpu").run
    found, _ = planning.compositions(run, {n: s for n, s in planning.offering(run).items() if n in names})
    return run, found


def test_whole_models_with_few_copies_are_traced() -> None:
    """Searches mostly choose such layouts. Sixteen copies come before two if one compares the texts."""
    _, found = composed(64, "fsdp2", "pipeline")
    serves = representatives(found)
    both = [i for i, one in enumerate(found) if {"dp_replicate", "dp_shard"} <= planning.degrees(one.pieces).keys()]
    several = [i for i in both if min(planning.degrees(found[i].pieces)[n] for n in ("dp_replicate", "dp_shard")) > 1]
    assert {found[i].layout.count("layers") for i in several} == {1, 2}
    for i in several:
        traced = found[serves[i]]
        assert (traced.layout.count("layers"), planning.degrees(traced.pieces)["dp_replicate"]) == (1, 2)


def test_a_degree_that_divides_sequences_lies_between_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third party may offer such an axis; the degrees of those that split the batch are scaled without ends."""
    choices = hookimpl(lambda self: [Choice("degree", (2, 4, 8))])
    monkeypatch.setattr(ContextParallel, "choices", choices, raising=False)
    run, found = composed(32, "context_parallel", "fsdp2")
    own = {i: one.inner for i, one in enumerate(found) if "context_parallel" in one.strategies}
    assert {tuple(inner) for inner in own.values()} == {("cp",)}
    mixes = ends(run, found, sorted(set(representatives(found).values())))
    put = {i: [found[j].inner["cp"] for _, j in mix] for i, mix in mixes.items() if len(mix) > 1}
    assert put
    assert {(own[i]["cp"], *degrees) for i, degrees in put.items()} == {(4, 2, 8)}


@pytest.mark.parametrize("selected", [False, True])
def test_stages_follow_the_options_of_the_composition_or_of_the_run(selected: bool) -> None:
    run, found = composed(2, "pipeline")
    for one in (one for one in found if one.divides):
        options = one.strategies["pipeline"]
        if selected:
            run.strategies["pipeline"] = Pipeline(2, "gpipe")
        plan = stage_plan(run, one, 4, *build_model(run.config.model))
        assert plan.schedule == ("gpipe" if selected else options["schedule"]), json.dumps(options)
        assert (len(plan.actions), plan.actions[0][-1].micro) == (2, 3)
