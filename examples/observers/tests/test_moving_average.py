"""Validation computes with the average, in any layout that of one process, and training does not notice."""

import sys

import cloudpickle
import pytest
import torch
from plait_observers.moving_average import MovingAverage, parameters

from plait import Batch
from plait.testing import Trial

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test

DECAY = 0.75
LAYOUTS = {
    "fsdp2": (2, {"fsdp2": {}}),
    "ddp": (2, {"ddp": {}}),
    "tensor_parallel, fsdp2": (4, {"tensor_parallel": {"degree": 2}, "fsdp2": {}}),
    "pipeline": (2, {"pipeline": {"degree": 2}}),
}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def losses(strategies, averaged=True, steps=4):
    """(the losses of training, those of validation) of one rank's tokens, with a validation after every step."""
    trial = Trial()
    applied = trial.apply(strategies)
    optimizer = trial.optimizer(applied.parameters())
    observer = MovingAverage(DECAY)
    observer.begin(applied, optimizer)
    share, shares = applied.mesh.rank_and_size("batch")
    trained, validated = [], []
    for step in range(steps):
        batches = [[x.tensor_split(shares)[share] for x in trial.batch(n)] for n in (step, 99)]
        done = applied.step(Batch(*batches[0]), optimizer, observer=observer if averaged else None)
        trained.append(float(done.loss))
        if averaged:
            observer.validate(step)
        with torch.no_grad():
            validated.append(float(applied.forward_backward([applied.deal(Batch(*batches[1]))], 1)))
        if averaged:
            observer.validated(step, 0.0)
    return trained, validated


def by_hand(steps=4):
    """The validation losses of averages that are made from whole parameters, in one process."""
    trial = Trial()
    applied = trial.apply({})
    optimizer = trial.optimizer(applied.parameters())
    average = {fqn: whole(param) for fqn, param in parameters(applied)}
    validated = []
    for step in range(steps):
        applied.step(Batch(*trial.batch(step), None), optimizer)
        for fqn, param in parameters(applied):
            average[fqn] = DECAY * average[fqn] + (1 - DECAY) * param
        other = trial.apply({})
        for fqn, param in parameters(other):
            param.copy_(average[fqn])
        with torch.no_grad():
            validated.append(float(other.forward_backward([Batch(*trial.batch(99), None)], 1)))
    return validated


def test_validation_uses_the_average(plait_ranks):
    ((trained, validated),) = plait_ranks.run(losses, {}, world=1)
    ((alone, last),) = plait_ranks.run(losses, {}, False, world=1)
    (expected,) = plait_ranks.run(by_hand, world=1)
    assert validated == pytest.approx(expected, rel=1e-13)
    assert trained == alone
    assert validated != pytest.approx(last, rel=1e-3)


QUICK = ("fsdp2", "pipeline")


@pytest.mark.parametrize("layout", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_any_layout_validates_as_one_process(plait_ranks, layout):
    world, strategies = LAYOUTS[layout]
    ((_, expected),) = plait_ranks.run(losses, {}, world=1)
    both = plait_ranks.run(losses, strategies, world=world)
    plain = plait_ranks.run(losses, strategies, False, world=world)
    assert [trained for trained, _ in both] == [trained for trained, _ in plain]
    parts = [validated for _, validated in both]
    data = {"fsdp2": 2, "ddp": 2, "tensor_parallel, fsdp2": 2}.get(layout, 1)
    sums = [sum(each) / (world // data) for each in zip(*parts, strict=True)]
    assert sums == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_average(plait_project):
    run = (
        *("train", "launch.device=cpu", "launch.nproc_per_node=2", "strategy=[fsdp2]", "model.n_layers=1"),
        *("model.dim=32", "train.seq_len=16", "train.local_batch_size=1", "validation.interval=2"),
        *("schedule.decay_steps=0", "metrics.tensorboard=false", "checkpoint.export=false"),
        *("observer=[moving_average]", "observer.moving_average.decay=0.5"),
    )
    assert plait_project(*run, "run.name=whole", "train.steps=6", ranks=2).code == 0
    for steps in (3, 6):
        assert plait_project(*run, "run.name=twice", f"train.steps={steps}", ranks=2).code == 0
    got = [[row.get("val_loss") for row in plait_project.rows(name)] for name in ("whole", "twice")]
    assert got[0][-1] == got[1][-1]
