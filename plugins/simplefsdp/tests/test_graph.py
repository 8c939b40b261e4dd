"""What is in the graphs: how many collectives, what backward does once more, and that one set of graphs serves all."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from chain import BLOCKS, Block, Chain

from plait.parallel.simulated import simulated
from plait_testing.models import llama3
from plait_testing.trial import Trial, take_step

SLOW = pytest.mark.slow
KNOWN = {}


MODELS = pytest.mark.parametrize(
    ("model", "inside", "again", "outside"),
    [(Chain, 4, 3, 2), pytest.param("llama3", 9, 9, 3, marks=SLOW)],  # backward needs no bias
    ids=("chain", "llama3"),
)


def planned(options, **of_trial):
    """Graph -> what its passes reported, of a step and a validation; and bytes that forward keeps for backward.

    The other 3 ranks do not exist, so what is computed is wrong, but graphs and sizes are those of a real rank.
    """
    key = repr((options, of_trial))
    if key not in KNOWN:
        with simulated(4):
            KNOWN[key] = step(options, **of_trial)
        torch._dynamo.reset()
    return KNOWN[key]


def step(options, **of_trial):
    from plait_simplefsdp.report import Report

    found, add = {}, Report.add

    def noted(self: Any, report: dict[str, Any]) -> None:
        found[report["graph"]] = report
        add(self, report)

    with mock.patch.object(Report, "add", noted):
        trial = Trial(**{"model": Chain, "dtype": "float32", "compile": "aot_eager", **of_trial})
        applied = trial.apply({"simplefsdp": options})
        tokens, _ = trial.batch(0)
        logits = applied.parts[0](tokens[:2])
        kept = {t.data_ptr(): t.numel() * t.element_size() for t in logits.grad_fn.saved_tensors}
        logits.sum().backward()
        if not options:
            with torch.no_grad():
                applied.parts[0](tokens[:2])
    return found, sum(kept.values())


def counts(report, when="after"):
    return {kind: entry["count"] for kind, entry in report[when]["collectives"].items()}


@pytest.mark.parametrize(
    ("reshard", "gathered"),
    [
        pytest.param("default", BLOCKS - 1, id="default"),
        pytest.param("always", BLOCKS, id="always"),
        pytest.param("never", 0, id="never"),
    ],
)
@SLOW
@MODELS
def test_the_block_pass_leaves_one_a_block(reshard, gathered, model, inside, again, outside):
    found, _ = planned({"reshard_after_forward": reshard} if reshard != "default" else {}, model=model)
    whole = inside * BLOCKS + outside
    assert counts(found["forward"], "before") == {"all_gather": whole}  # one a parameter
    assert counts(found["backward"], "before")["reduce_scatter"] == whole
    assert counts(found["backward"], "before").get("all_gather", 0) == again * gathered
    assert counts(found["forward"]) == counts(found.get("inference", found["forward"])) == {"all_gather": BLOCKS + 2}
    backward = {"all_gather": gathered} if gathered else {}
    assert counts(found["backward"]) == {"reduce_scatter": BLOCKS + 2, **backward}
    for report in found.values():
        before, after = report["before"]["collectives"], report["after"]["collectives"]
        assert {kind: entry["bytes"] for kind, entry in after.items()} == {k: e["bytes"] for k, e in before.items()}


@SLOW
def test_copies_are_summed_after_shards():
    after = planned({"replicate": 2})[0]["backward"]["after"]["collectives"]
    assert after["all_reduce"]["count"] == after["reduce_scatter"]["count"] == BLOCKS + 2
    assert after["all_reduce"]["bytes"] * 2 == after["reduce_scatter"]["bytes"]  # of shards, not of the whole


@SLOW
def test_resharding_frees():
    """Bytes that live between forward and backward fall by those of the blocks that are gathered again."""
    never, default, always = (
        planned(options)[1] for options in ({"reshard_after_forward": "never"}, {}, {"reshard_after_forward": "always"})
    )
    with torch.device("meta"):
        sizes = {name: p.numel() * 4 for name, p in Block().named_parameters()}
    whole = sum(size for name, size in sizes.items() if name != "up.bias")  # which backward does not need
    shards = sum(sizes.values()) // 4  # what is kept instead, to be gathered again
    assert never - default >= (BLOCKS - 1) * (whole - shards)
    assert default - always >= whole - shards


@SLOW
@pytest.mark.parametrize("kept", [("full", "none"), ("full", "selective", "none")], ids=len)
def test_recomputation_keeps_less(kept):
    sizes = [planned({}, remat=mode)[1] for mode in kept]
    assert sizes == sorted(set(sizes))


@SLOW
def test_a_budget_is_kept():
    sizes = [planned({}, remat="budget", budget=budget)[1] for budget in (0.3, 0.8)]
    assert planned({}, remat="full")[1] < sizes[0] < sizes[1] < planned({})[1]


uneven = functools.partial(llama3, ffn_dim=50, vocab_size=67)


@SLOW
@pytest.mark.parametrize("passes", [["bucket_block", "reorder"], ["bucket_auto", "reorder", "memory"]])
def test_ranks_whose_shards_differ_plan_alike(plait_ranks, passes):
    """One that joined or moved otherwise than the rest would wait for ever, or take another's numbers for its own."""
    (first, _), *others = plait_ranks.run(functools.partial(step, model=uneven), {"passes": passes}, world=4)
    for other, _ in others:
        for kind, report in first.items():
            assert all(other[kind][key] == report[key] for key in ("buckets", "moved", "held_back"))


def graphs(trial, strategies, steps):
    """(graphs, breaks in them) after each step; how many rows each of a rank's experts had, a call."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    applied = trial.apply(strategies)
    optimizer, found, loads = trial.optimizer(applied.parameters()), [], set()
    for step in range(steps):
        take_step(applied, optimizer, trial, step)
        loads |= {(name, *b.tolist()) for name, b in applied.parts[0].named_buffers() if name.endswith(".now")}
        found.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    return found, loads


def test_one_graph_for_all_steps_and_batches():
    from torch._dynamo.utils import counters

    trial = Trial(Chain, dtype="float32", compile="aot_eager", micro=2)
    with simulated(2):
        assert graphs(trial, {"simplefsdp": {}}, 5)[0] == [(2, 0)] * 5  # the other is the loss
        applied, tokens = trial.apply({"simplefsdp": {}}), trial.batch(0)[0]
        torch._dynamo.reset()
        counters.clear()
        for size in (4, 2, 8, 3):
            applied.parts[0](tokens[:size]).sum().backward()
        assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@SLOW
def test_one_graph_however_the_routing_changes(plait_ranks):
    pytest.importorskip("plait_expert_parallel")
    trial = Trial("moe", dtype="float32", compile="aot_eager")
    strategies = {"simplefsdp": {}, "expert_parallel": {"degree": 2}}
    for found, loads in plait_ranks.run(graphs, trial, strategies, 20, world=2, timeout=240):
        assert len(loads) > 15  # it does change
        assert found == [(2, 0)] * 20  # the other is the loss


@SLOW
def test_inductor_sees_the_same_plan():
    def told(compile):
        return {kind: counts(report) for kind, report in planned({}, compile=compile)[0].items()}

    assert told("inductor") == told("aot_eager")


@pytest.mark.parametrize("compile", ["aot_eager", pytest.param("inductor", marks=SLOW)])
def test_nothing_of_torch_stays_changed(compile):
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    def now():
        return [c.get_config_copy() for c in (torch._dynamo.config, torch._functorch.config, torch._inductor.config)]

    before = now()
    planned({"passes": []}, remat="budget", compile=compile)
    assert now() == before
