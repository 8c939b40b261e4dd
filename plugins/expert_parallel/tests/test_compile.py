"""Compiled and recomputed mixtures: the same numbers, and one set of graphs however the routing changes."""

import pytest
import torch
from crowd import Town
from test_town import LAYOUTS, same

from plait.testing.models import moe
from plait.testing.trial import Trial, forward_backward

BOTH = "fsdp2 x tp 2 x ep 2"


SLOW = pytest.mark.slow
OFTEN = [(None, "selective")]
WAYS = [(compile, remat) for compile in (None, "aot_eager") for remat in ("none", "full", "selective")]


@pytest.mark.parametrize(("compile", "remat"), [pytest.param(*w, marks=() if w in OFTEN else SLOW) for w in WAYS[1:]])
@pytest.mark.parametrize("model", [pytest.param(Town, marks=SLOW), moe])
def test_parity(plait_ranks, model, compile, remat):
    same(plait_ranks, Trial(model, compile=compile, remat=remat), *LAYOUTS[BOTH])


def graphs(trial, strategies, steps):
    """(graphs compiled, graph breaks) after each step; how many rows each expert of this rank had, a call."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    applied = trial.apply(strategies)
    optimizer = trial.optimizer(applied.parameters())
    had = []
    for name, module in applied.parts[0].named_modules():
        if name.endswith(("people", "experts")):
            module.register_forward_pre_hook(lambda module, args: had.append(tuple(args[1].tolist())))
    found = []
    for step in range(steps):
        forward_backward(applied, trial, step)
        optimizer.step()
        optimizer.zero_grad()
        applied.after_step(optimizer, step + 1)
        found.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    return found, had, list(counters["graph_break"])


@pytest.mark.parametrize(
    ("layout", "model", "remat"),
    [
        ("fsdp2 x ep 2", Town, "none"),
        pytest.param("fsdp2 x ep 2", Town, "full", marks=SLOW),
        pytest.param(BOTH, Town, "none", marks=SLOW),
        pytest.param(BOTH, moe, "full", marks=SLOW),
        pytest.param("fsdp2 x ep 2", moe, "selective", marks=SLOW),
    ],
)
def test_no_break_and_no_graph_is_new_however_the_routing_changes(plait_ranks, layout, model, remat):
    world, strategies = LAYOUTS[layout]
    trial = Trial(model, compile="aot_eager", remat=remat)
    for found, had, breaks in plait_ranks.run(graphs, trial, strategies, 20, world=world, timeout=240):
        assert len(set(had)) > 20  # the routing does change
        assert found[1:] == [found[0]] * 19
        assert all("how many rows cross ranks" in reason for reason in breaks), breaks  # what the module wished for
