"""Norms per block and the noise scale are those of one process in any layout; a run ends when nothing is gained."""

import sys

import cloudpickle
import pytest
from plait_observers.early_stop import EarlyStop
from plait_observers.gradients import Gradients

from plait import Batch
from plait.testing import Trial

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test

LAYOUTS = {
    "fsdp2": (2, {"fsdp2": {}}),
    "tensor_parallel": (2, {"tensor_parallel": {"degree": 2}}),
    "both": (4, {"tensor_parallel": {"degree": 2}, "fsdp2": {}}),
    "pipeline": (2, {"pipeline": {"degree": 2}}),
}


def watched(strategies, steps=4):
    """What a rank logged in each step."""
    trial = Trial(micro=2)
    applied = trial.apply(strategies)
    optimizer = trial.optimizer(applied.parameters())
    observer = Gradients(every=2, noise=True)
    observer.begin(applied, optimizer)
    share, shares = applied.mesh.rank_and_size("batch")
    logged = []
    for step in range(steps):
        tokens, labels = (x.tensor_split(shares)[share] for x in trial.batch(step))
        applied.step(Batch(tokens, labels, None), optimizer, observer=observer, rows=len(tokens) // 2)
        logged.append({name: float(value) for name, value in applied.run.take_logged().items()})
    return logged


@pytest.fixture(scope="module")
def alone(plait_ranks):
    (logged,) = plait_ranks.run(watched, {}, world=1)
    return logged


def test_what_is_logged(alone):
    assert [bool(each) for each in alone] == [False, True, False, True]
    blocks = {name for name in alone[1] if name != "gradients/noise_scale"}
    assert {"gradients/layers.0", "gradients/rest"} <= blocks
    assert all(alone[1][name] > 0 for name in blocks)
    assert alone[3]["gradients/noise_scale"] != alone[1]["gradients/noise_scale"]


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=pytest.mark.slow) if x in ("both", "tensor_parallel") else x for x in LAYOUTS]
)
def test_any_layout_logs_what_one_process_does(plait_ranks, alone, layout):
    world, strategies = LAYOUTS[layout]
    for logged in plait_ranks.run(watched, strategies, world=world):
        for got, expected in zip(logged, alone, strict=True):
            assert got == pytest.approx(expected, rel=1e-9)


class Applied:
    """What EarlyStop needs of a run."""

    def __init__(self):
        self.run, self.logged, self.stopped = self, {}, ""

    def log(self, name, value):
        self.logged[name] = value

    def stop(self, reason):
        self.stopped = reason


def test_an_early_end():
    observer, applied = EarlyStop(patience=2, gain=0.1), Applied()
    observer.begin(applied, None)
    for step, (loss, waited) in enumerate([(3.0, 0), (2.8, 0), (2.75, 1), (2.5, 0), (2.45, 1)]):
        observer.validated(step, loss)
        assert (applied.logged["early_stop/waited"], applied.stopped) == (waited, "")
    observer.validated(9, 2.41)
    assert applied.stopped == "no validation since 2 gained on 2.5000"
