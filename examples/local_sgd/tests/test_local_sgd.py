"""What is local SGD's alone: it is SGD at k=1, workers part and meet, and a checkpoint is their average."""

import math

import attrs
import pytest
import torch
import torch.distributed as dist
from plait_local_sgd.reference import simulate

from plait.checkpoint.load import load
from plait.checkpoint.save import Saver
from plait.checkpoint.store import Store
from plait.testing import Trial, TrialResult, apart, full, take_step, train, unequal, whole


@attrs.frozen
class Sgd(Trial):
    """Plain SGD, without clipping, which is a worker's own affair."""

    max_norm: float = math.inf

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.5)


def furthest(result: TrialResult, reference: TrialResult) -> float:
    return max(float((result.final[name] - p).abs().max()) for name, p in reference.final.items())


@pytest.mark.parametrize(
    ("world", "beside"),
    [(2, {}), (4, {"fsdp2": {}}), *(pytest.param(4, beside, marks=pytest.mark.slow) for beside in ({}, {"ddp": {}}))],
)
def test_averaging_every_step_is_one_process(plait_ranks, world, beside):
    trial = Sgd(steps=20, micro=2)
    options = {"degree": 2 if beside else world, "every": 1}
    (one,) = plait_ranks.run(train, Sgd(steps=20), world=1)
    for result in plait_ranks.run(train, trial, {"local_sgd": options, **beside}, world=world):
        assert apart(result.losses, one.losses)[0] < 1e-10
        assert furthest(result, one) < 1e-10


def test_workers_part_and_meet(plait_ranks):
    """After 4 steps with k=3 each rank is where its own worker is, after 6 all are where the average is."""
    for steps, met in ((4, False), (6, True)):
        trial = Trial(steps=steps)
        (expected,) = plait_ranks.run(simulate, trial, 2, 3, world=1)
        results = plait_ranks.run(train, trial, {"local_sgd": {"every": 3}}, world=2)
        assert all(furthest(*pair) < 1e-10 for pair in zip(results, expected, strict=True))
        assert (unequal(results[0].final, results[1].final) is None) == met


def step(applied, optimizer, number):
    take_step(applied, optimizer, Trial(), number)


def save_between_syncs(strategies, folder):
    """(parameters and momenta of this rank, the average in the checkpoint, those of this rank after the next step);
    saved after step 2."""
    applied = Trial().apply(strategies)
    optimizer = Trial().optimizer(applied.parameters())
    step(applied, optimizer, 0)
    step(applied, optimizer, 1)
    before = everything(applied, optimizer)
    state, _ = applied.checkpoint(optimizer)
    Saver(Store(folder), "sync").save(state, 2)
    assert unequal(everything(applied, optimizer), before) is None
    average = canonical(state)
    step(applied, optimizer, 2)
    return before, average, everything(applied, optimizer)


def canonical(state):
    return {key: full(tensor) for key, tensor in state.items() if key.startswith(("model.", "optimizer."))}


def everything(applied, optimizer):
    (model,) = applied.parts
    momenta = {f"{name} avg": full(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters()}
    return whole(model) | momenta


def restore(strategies, folder, steps_before=0):
    """(the canonical state, parameters and momenta of this rank, those after another step)."""
    trial = Trial(seed=1)
    applied = trial.apply(strategies)
    optimizer = trial.optimizer(applied.parameters())
    for number in range(steps_before):
        step(applied, optimizer, number)
    load(Store(folder).latest(), *applied.checkpoint(optimizer))
    state, here = canonical(applied.checkpoint(optimizer)[0]), everything(applied, optimizer)
    step(applied, optimizer, 2)
    return state, here, everything(applied, optimizer)


@pytest.mark.parametrize("beside", [{}, pytest.param({"fsdp2": {}}, marks=pytest.mark.slow)])
def test_a_checkpoint_between_syncs_is_the_average_and_changes_nothing(plait_ranks, tmp_path, beside):
    """Of parameters and momenta; any layout loads it, and as many workers go on from where each was."""
    world = 4 if beside else 2
    strategies = {"local_sgd": {"degree": 2, "every": 5}, **beside}
    answers = plait_ranks.run(save_between_syncs, strategies, tmp_path, world=world)
    (a, saved, _), (b, _, _) = answers[0], answers[-1]  # a rank of each worker
    assert unequal(a, b) is not None
    mean = {name: (a[name] + b[name]) / 2 for name in a}
    for _, average, _ in answers:
        assert unequal(average, saved) is None
    assert all(torch.equal(saved[f"model.{name}"], p) for name, p in mean.items() if not name.endswith(" avg"))
    for steps in (0, 3):
        again = plait_ranks.run(restore, strategies, tmp_path, steps, world=world)
        for (before, _, after), (state, here, there) in zip(answers, again, strict=True):
            assert unequal(state, saved) is None
            assert unequal(here, before) is None
            assert unequal(there, after) is None
    others = (({}, 1), ({"fsdp2": {}}, 2), ({"ddp": {}}, 4), ({"local_sgd": {"degree": 4}}, 4))
    for steps in (0, 3):
        for other, ranks in others:
            for loaded, here, _ in plait_ranks.run(restore, other, tmp_path, steps, world=ranks):
                assert unequal(loaded, saved) is None
                assert unequal(here, mean) is None


def meshes():
    mesh = Trial().apply({"local_sgd": {"degree": 2}, "fsdp2": {}}).mesh
    return mesh.rank_and_size("batch"), mesh["worker"].mesh.tolist(), mesh.data().mesh.tolist(), dist.get_rank()


def test_workers_share_the_batch_and_no_gradients(plait_ranks):
    for share, workers, data, rank in plait_ranks.run(meshes, world=4):
        assert share == (rank, 4)
        assert workers == [rank % 2, rank % 2 + 2]
        assert data == [rank // 2 * 2, rank // 2 * 2 + 1]
