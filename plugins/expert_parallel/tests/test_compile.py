"""Compiled and recomputed mixtures: the same numbers, and one set of graphs however the routing changes."""

import functools

import pytest
import torch
from crowd import Town
from test_town import LAYOUTS, same

from plait_testing.models import moe
from plait_testing.parity import apart
from plait_testing.trial import Trial, take_step, train

two = functools.partial(moe, n_layers=2)  # a dense block and one with experts
BOTH = "fsdp2 x tp 2 x ep 2"


SLOW = pytest.mark.slow
WAYS = [
    (two, None, "selective", "fsdp2 x ep 2"),
    *(
        pytest.param(*way, BOTH, marks=SLOW)
        for way in [
            *(
                (moe, None, "selective"),
                (moe, None, "full"),
                (two, "aot_eager", "none"),
                (two, "aot_eager", "selective"),
            ),
            *((Town, None, "selective"), (Town, "aot_eager", "full")),
        ]
    ),
]


@pytest.mark.parametrize(("model", "compile", "remat", "layout"), WAYS)
def test_parity(plait_ranks, model, compile, remat, layout):
    same(plait_ranks, Trial(model, compile=compile, remat=remat), *LAYOUTS[layout])


def graphs(trial, strategies):
    """(graphs compiled so far, graph breaks) after each step; its loss; how many rows each expert of this rank had in
    each call; why graphs broke."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    applied = trial.apply(strategies)
    optimizer = trial.optimizer(applied.parameters())
    had = []
    for name, module in applied.parts[0].named_modules():
        if name.endswith(("people", "experts")):
            module.register_forward_pre_hook(lambda module, args: had.append(tuple(args[1].tolist())))
    found, losses = [], []
    for step in range(trial.steps):
        losses.append(take_step(applied, optimizer, trial, step)[0])
        found.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    return found, losses, had, list(counters["graph_break"])


EP2 = {"fsdp2": {}, "expert_parallel": {"degree": 2}}


@pytest.mark.parametrize(
    ("model", "remat", "steps", "world", "strategies"),
    [
        pytest.param(functools.partial(Town, cells=1), "none", 10, 2, EP2, marks=SLOW),
        *(
            pytest.param(model, remat, 20, *LAYOUTS[layout], marks=SLOW)
            for layout, model, remat in [("fsdp2 x ep 2", Town, "full"), (BOTH, Town, "none"), (BOTH, two, "selective")]
        ),
    ],
)
def test_no_break_and_no_graph_is_new_however_the_routing_changes(plait_ranks, model, remat, steps, world, strategies):
    (one,) = plait_ranks.run(train, Trial(model, steps=steps), world=1)
    trial = Trial(model, compile="aot_eager", remat=remat, steps=steps)
    for found, losses, had, breaks in plait_ranks.run(graphs, trial, strategies, world=world, timeout=240):
        assert len(set(had)) >= min(steps, len(had) // 2)  # the routing does change
        assert found[1:] == [found[0]] * (steps - 1)
        assert apart(losses, one.losses)[0] <= 1e-9
        assert all("how many rows cross ranks" in reason for reason in breaks), breaks  # what the module wished for
