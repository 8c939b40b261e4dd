"""A run whose optimizer keeps its states in bfloat16 or 8 bits goes on in another layout as in one process.

The bound, stated before it was measured: 1e-9 of the way of each parameter, after 2 steps and 3 more, in float64.
"""

import sys

import cloudpickle
import pytest

from plait import Batch, canonical
from plait.host import Saver, Store, load, make_optimizer
from plait.testing import Trial, batch, full
from plait.train.rounding import Rounding
from tests.helpers.layouts import LAYOUTS

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test

SAVED, STEPS = 2, 5
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 1e-2}
MUON = {"_target_": "plait_muon.muon.Muon", "lr": 1e-2}


def trained(strategies, states, node, first=0, last=STEPS, folder=None, start=None):
    """(parameters at the end by FQN, the checkpoint that was saved then in `folder`). start: one to begin from."""
    trial, rounding = Trial("llama3"), Rounding(states, False, seed=0, step=first)
    applied = trial.apply(strategies)
    optimizer = applied.optimizer(lambda groups: make_optimizer(node, groups, rounding=rounding))
    if start is not None:
        load(start, *applied.checkpoint(optimizer))
    for number in range(first, last):
        tokens, labels = batch(number)
        index, count = applied.mesh.rank_and_size("batch")
        applied.step(Batch(tokens.chunk(count)[index], labels.chunk(count)[index]), optimizer, max_norm=1.0)
        rounding.step += 1
    saved = None
    if folder is not None:
        saver = Saver(Store(folder), "sync")
        saver.save(applied.checkpoint(optimizer)[0], last)
        saver.wait()
        saved = Store(folder).latest()
    ends = {canonical(n): full(p).detach().clone() for part in applied.parts for n, p in part.named_parameters()}
    return ends, saved


PAIRS = [("fsdp2", "tensor_parallel"), ("tensor_parallel", "pipeline"), ("pipeline", "zero"), ("zero", "fsdp2")]


@pytest.mark.slow
@pytest.mark.parametrize(("states", "node"), [("bfloat16", ADAMW), ("8bit", ADAMW), ("8bit", MUON)])
@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_it_goes_on_in_another_layout(plait_ranks, tmp_path, saved, resumed, states, node):
    ((one, _),) = plait_ranks.run(trained, {}, states, node, world=1)
    ((begin, _),) = plait_ranks.run(trained, {}, states, node, 0, 0, world=1)
    ran = plait_ranks.run(trained, LAYOUTS[saved][1], states, node, 0, SAVED, tmp_path, world=2)
    found = plait_ranks.run(trained, LAYOUTS[resumed][1], states, node, SAVED, STEPS, None, ran[0][1], world=2)
    ends = {fqn: value for each, _ in found for fqn, value in each.items()}
    assert ends.keys() == one.keys()
    for fqn, value in one.items():
        assert float((ends[fqn] - value).norm()) <= 1e-9 * float((value - begin[fqn]).norm()), fqn
