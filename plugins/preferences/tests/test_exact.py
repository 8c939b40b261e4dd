"""Losses of preferences: their formulas, and their gradients in every layout against one process of plain torch."""

import math
import sys
from typing import Any
from unittest import mock

import attrs
import cloudpickle
import pytest
import torch
import torch.nn.functional as F

from plait.parallel.sequence_loss import SequenceLoss
from plait.testing import Trial, share, train
from plait_preferences import Dpo, Ipo, Kto, Orpo

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test

BOUND = 1e-10  # of a gradient, relative to one process in float64
LOSSES = {
    "dpo": {"beta": 0.2, "label_smoothing": 0.1},
    "ipo": {"beta": 0.3},
    "orpo": {"beta": 0.5},
    "kto": {"beta": 0.2, "desirable_weight": 1.5},
}


def by_hand(name, logps, tokens, reference):
    """The mean loss over the pairs of a batch, or over the answers of KTO; written from the papers, row by row."""
    total = torch.zeros((), dtype=torch.float64)
    if name == "kto":
        micro = 4  # rows
        for first in range(0, len(logps), micro):
            rows = range(first, first + micro)
            divergence = max(sum(float((logps[i] - reference[i]).detach()) for i in rows if i % 2) / (micro / 2), 0.0)
            for i in rows[::2]:
                total = total + 1.5 * (1 - torch.sigmoid(0.2 * (logps[i] - reference[i] - divergence)))
        return total / (len(logps) / 2)
    for w, r in zip(range(0, len(logps), 2), range(1, len(logps), 2), strict=True):
        if name == "dpo":
            margin = 0.2 * ((logps[w] - reference[w]) - (logps[r] - reference[r]))
            total = total + 0.9 * torch.log1p(torch.exp(-margin)) + 0.1 * torch.log1p(torch.exp(margin))
        elif name == "ipo":
            ratio = [(logps[i] - reference[i]) / tokens[i] for i in (w, r)]
            total = total + (ratio[0] - ratio[1] - 1 / (2 * 0.3)) ** 2
        else:
            p = [torch.exp(logps[i] / tokens[i]) for i in (w, r)]
            odds = [each / (1 - each) for each in p]
            total = total - p[0].log() + 0.5 * torch.log1p(odds[1] / odds[0])
    return total / (len(logps) / 2)


def plain(trial, name, strategies):
    """(gradients by FQN, loss) of the trial's first batch in one process. strategies: that change the model."""
    applied = trial.apply(strategies)
    batch, _ = share(applied, trial, 0)
    (model,) = applied.parts
    logps = F.cross_entropy(model(batch.tokens).transpose(1, 2), batch.labels, reduction="none").neg().sum(1)
    loss = by_hand(name, logps, (batch.labels != -100).sum(1), applied.loss.reference)
    applied.balance.scale(batch.tokens.numel())  # of experts: over all tokens
    loss.backward()
    return {fqn: p.grad.clone() for fqn, p in model.named_parameters() if p.grad is not None}, float(loss.detach())


def trial_of(name, **more):
    return Trial(loss={name: LOSSES[name]}, **{"steps": 1, "max_norm": math.inf, **more})


def found(name, strategies, world, plait_ranks, **more):
    """What training computes in this layout, of micro-batches of 4 rows in every layout."""
    data = world // math.prod(o.get("degree", 1) for s, o in strategies.items() if s != "expert_parallel")
    return plait_ranks.run(train, trial_of(name, **{"micro": 8 // data // 4, **more}), strategies, world=world)


def off(results, gradients, loss):
    """The largest distance of a gradient, or of the loss, from one process."""
    worst = 0.0
    for one in results:
        assert one.gradients.keys() == gradients.keys()
        whole = math.hypot(*(float(g.norm()) for g in gradients.values()))
        apart = (
            float((one.gradients[fqn] - g).norm()) / max(float(g.norm()), 1e-3 * whole) for fqn, g in gradients.items()
        )
        worst = max(worst, abs(one.losses[0] / loss - 1), *apart)
    return worst


LAYOUTS: dict[str, Any] = {
    "one process": ({}, 1, "llama3"),
    "fsdp2": ({"fsdp2": {}}, 2, "llama3"),
    "tensor_parallel": ({"tensor_parallel": {"degree": 2}}, 2, "llama3"),
    "context_parallel": ({"context_parallel": {"degree": 2}, "fsdp2": {}}, 2, "llama3"),
    "pipeline": ({"pipeline": {"degree": 2}}, 2, "llama3"),
    "lora": ({"lora": {"rank": 2, "random_base": True}, "fsdp2": {}}, 2, "llama3"),
    "expert_parallel": ({"expert_parallel": {"degree": 2}, "fsdp2": {}}, 2, "moe"),
}


QUICK = [("dpo", "one process"), ("dpo", "tensor_parallel"), ("dpo", "pipeline")]

CASES = [  # what tells most of each loss, and of each layout, in every run of the tests
    pytest.param(
        name,
        layout,
        marks=() if (name, layout) in QUICK or (layout == "context_parallel" and name != "dpo") else pytest.mark.slow,
    )
    for name in LOSSES
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_gradients_are_those_of_one_process(plait_ranks, name, layout):
    strategies, world, model = LAYOUTS[layout]
    own = {each: options for each, options in strategies.items() if each == "lora"}
    (one,) = plait_ranks.once(plain, trial_of(name, model=model), name, own, world=1)
    assert off(found(name, strategies, world, plait_ranks, model=model), *one) < BOUND


def test_columns_can_stand_in_a_row():
    """`Run.log` takes WHO/WHAT."""
    columns = {name for loss in (Dpo, Ipo, Kto, Orpo) for name in loss.columns}
    assert all(name.count("/") == 1 for name in columns)


def local_part(self, logits, batch):
    axes, self._axes = self._axes, []
    try:
        return CALL(self, logits, batch)
    finally:
        self._axes = axes


def by_length_of_the_batch(self, logits, batch):
    of = self.made.of_sequences

    def wrong(rows):
        return of(attrs.evolve(rows, tokens=rows.tokens.mean().expand_as(rows.tokens)))

    with mock.patch.object(type(self.made), "of_sequences", lambda made, rows: wrong(rows)):
        return CALL(self, logits, batch)


def every_part_counts(self, logits, batch):
    counts, self._counts = self._counts, True
    try:
        return CALL(self, logits, batch)
    finally:
        self._counts = counts


CALL = SequenceLoss.__call__
BUGS: dict[str, Any] = {
    "the local part of a row alone": (local_part, "dpo", "context_parallel"),
    "lengths of other rows": (by_length_of_the_batch, "ipo", "one process"),
    "the value of every part": (every_part_counts, "dpo", "context_parallel"),
}


def broken(bug, *arguments):
    with mock.patch.object(SequenceLoss, "__call__", BUGS[bug][0]):
        return train(*arguments)


@pytest.mark.slow  # what it would miss is what the test above would
@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_seen(plait_ranks, bug):
    _, name, layout = BUGS[bug]
    strategies, world, _ = LAYOUTS[layout]
    (one,) = plait_ranks.once(plain, trial_of(name, model="llama3"), name, {}, world=1)
    assert off(plait_ranks.run(broken, bug, trial_of(name, micro=2), strategies, world=world), *one) > 1e-3
