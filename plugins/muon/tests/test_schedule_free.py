"""Schedule-free AdamW: the formulas of the paper, weights that are a mean between steps, the same in every layout."""

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from plait import Batch
from plait.testing import Layout, OptimizerSuite, Trial, batch
from plait_muon.schedule_free import ScheduleFree

FSDP2, TENSOR, EXPERT = {"fsdp2": {}}, {"tensor_parallel": {"degree": 2}}, {"expert_parallel": {"degree": 2}}
NODE = {"_target_": "plait_muon.schedule_free.ScheduleFree", "lr": 0.01}


class TestScheduleFree(OptimizerSuite):
    optimizer: ClassVar = NODE
    model = "moe"
    slow: ClassVar = ("test_a_run_goes_on",)  # muon's suite has it
    layouts: ClassVar = {
        "stages of experts": Layout(4, beside={"pipeline": {"degree": 2}, **EXPERT, **FSDP2}),
        "shards of states": Layout(2, beside={"zero": {}}),
    }


def test_it_takes_the_steps_of_the_paper():
    """Written with all three sequences whole; the gradient is a function of y."""
    start, (beta1, beta2), eps, decay = torch.linspace(-1, 1, 6, dtype=torch.float64), (0.9, 0.95), 1e-8, 0.3
    param = nn.Parameter(start.clone())
    optimizer = ScheduleFree([param], lr=0.1, betas=(beta1, beta2), weight_decay=decay, eps=eps)
    x, z, v, weights = start.clone(), start.clone(), torch.zeros_like(start), 0.0
    for step in range(1, 7):
        lr = 0.1 * min(1, step / 3)
        optimizer.param_groups[0]["lr"] = lr
        y = (1 - beta1) * z + beta1 * x
        grad = y**3 - 0.5
        v = beta2 * v + (1 - beta2) * grad**2
        z = z - lr * (grad / ((v / (1 - beta2**step)).sqrt() + eps) + decay * y)
        weights += lr**2
        x = x + lr**2 / weights * (z - x)

        optimizer.begin()
        assert torch.allclose(param.detach(), y, rtol=1e-12, atol=0)
        param.grad = param.detach() ** 3 - 0.5
        optimizer.step()
        assert torch.allclose(param.detach(), x, rtol=1e-12, atol=0)


def skipped_and_not(strategies):
    """Whether gradients of the third step were taken elsewhere than at the weights, and whether skipping it left all as
    it was."""
    trial = Trial("llama3", steps=3, trains_with=NODE)
    applied = trial.apply(strategies)
    optimizer: Any = applied.optimizer(trial.optimizer)
    seen = []
    begin = optimizer.begin
    optimizer.begin = lambda: (begin(), seen.append(copies(applied)))
    for number, skip in enumerate((None, None, lambda norm: True)):
        before = copies(applied)
        tokens, labels = batch(number)
        index, count = applied.mesh.rank_and_size("batch")
        own = Batch(tokens.chunk(count)[index], labels.chunk(count)[index])
        applied.step(own, optimizer, skip=skip)
    moved = not all(map(torch.equal, before, seen[-1]))
    return moved, all(map(torch.equal, before, copies(applied)))


def copies(applied):
    return [getattr(p.detach(), "to_local", p.detach)().clone() for p in applied.parameters()]


@pytest.mark.parametrize(
    "strategies", [FSDP2, pytest.param({"zero": {}}, marks=pytest.mark.slow)], ids=["fsdp2", "zero"]
)
def test_a_skipped_step_leaves_the_weights(plait_ranks, strategies):
    assert plait_ranks.run(skipped_and_not, strategies, world=2) == [(True, True)] * 2


def test_what_is_kept_needs_digits(plait_project):
    small = ("launch.device=cpu", "model.n_layers=1", "model.dim=32", "train.seq_len=16")
    for more, key in (("precision.optimizer=8bit", "optimizer"), ("precision.storage=bfloat16", "storage")):
        done = plait_project("train", "optimizer=schedule_free", more, *small)
        assert (done.code, done.error.key) == (1, f"precision.{key}"), done.err
