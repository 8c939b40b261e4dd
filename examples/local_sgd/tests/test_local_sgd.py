"""What is local SGD's alone: it is SGD at k=1, workers part and meet, and a checkpoint is their average."""

import math
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from plait_local_sgd import LocalSgd
from plait_local_sgd.reference import simulate
from plait_local_sgd.workers import set_to_mean

from plait import Batch
from plait.host import Saver, Store, load
from plait.testing import Trial, TrialResult, apart, batch, full, take_step, train, unequal, whole


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
    [(2, {}), *(pytest.param(4, beside, marks=pytest.mark.slow) for beside in ({}, {"ddp": {}}, {"fsdp2": {}}))],
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
    """(parameters and momenta of this rank, which are saved after step 2; those after the next step)."""
    applied = Trial().apply(strategies)
    optimizer = Trial().optimizer(applied.parameters())
    step(applied, optimizer, 0)
    step(applied, optimizer, 1)
    before = everything(applied, optimizer)
    Saver(Store(folder), "sync").save(applied.checkpoint(optimizer)[0], 2)
    assert unequal(everything(applied, optimizer), before) is None
    step(applied, optimizer, 2)
    return before, everything(applied, optimizer)


def everything(applied, optimizer):
    (model,) = applied.parts
    momenta = {f"{name} avg": full(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters()}
    return whole(model) | momenta


def restore(strategies, folder, steps_before=0):
    """(the state, parameters and momenta of this rank, those after another step)."""
    trial = Trial(seed=1)
    applied = trial.apply(strategies)
    optimizer = trial.optimizer(applied.parameters())
    for number in range(steps_before):
        step(applied, optimizer, number)
    load(Store(folder).latest(), *applied.checkpoint(optimizer))
    state = {key: full(tensor).clone() for key, tensor in applied.checkpoint(optimizer)[0].items()}
    here = everything(applied, optimizer)
    step(applied, optimizer, 2)
    return state, here, everything(applied, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [{}, {"fsdp2": {}}])
def test_a_checkpoint_between_syncs_is_the_average_and_changes_nothing(plait_ranks, tmp_path, beside):
    """Of parameters and momenta; any layout loads it, and as many workers go on from where each was."""
    world = 4 if beside else 2
    strategies = {"local_sgd": {"degree": 2, "every": 5}, **beside}
    answers = plait_ranks.run(save_between_syncs, strategies, tmp_path, world=world)
    (a, _), (b, _) = answers[0], answers[-1]  # a rank of each worker
    assert unequal(a, b) is not None
    mean = {name: (a[name] + b[name]) / 2 for name in a}
    ((saved, here, _),) = plait_ranks.run(restore, {}, tmp_path, world=1)
    assert unequal(here, mean) is None
    for steps in (0, 3):
        again = plait_ranks.run(restore, strategies, tmp_path, steps, world=world)
        for (before, after), (_, here, there) in zip(answers, again, strict=True):
            assert unequal(here, before) is None
            assert unequal(there, after) is None
    others = (({}, 1), ({"fsdp2": {}}, 2), ({"ddp": {}}, 4), ({"local_sgd": {"degree": 4}}, 4))
    for steps in (0, 3):
        for other, ranks in others:
            for loaded, here, _ in plait_ranks.run(restore, other, tmp_path, steps, world=ranks):
                assert unequal(loaded, saved) is None
                assert unequal(here, mean) is None


class OneForAll(LocalSgd):
    """Local SGD that does not say that its workers differ."""

    replicas: Any = None


def save_one_for_all(folder, only_moments):
    applied = Trial().apply({}, [OneForAll(degree=2, every=5)])
    optimizer = Trial().optimizer(applied.parameters())
    step(applied, optimizer, 0)
    if only_moments:
        for parameter in applied.parameters():
            set_to_mean(parameter.data, applied.mesh["worker"])
    Saver(Store(folder), "sync").save(applied.checkpoint(optimizer)[0], 1)


@pytest.mark.parametrize(("only_moments", "entry"), [(False, r"model\."), (True, r"optimizer\.[\w.]+\.exp_avg")])
def test_one_workers_values_are_never_saved_for_all(plait_ranks, tmp_path, only_moments, entry):
    said = rf"'{entry}[\w.]*' differs between rank 0 and rank 1 along the axis 'worker'"
    with pytest.raises(Exception, match=said):
        plait_ranks.run(save_one_for_all, tmp_path, only_moments, world=2)
    assert Store(tmp_path).found() == []


def meshes():
    mesh = Trial().apply({"local_sgd": {"degree": 2}, "fsdp2": {}}).mesh
    return mesh.rank_and_size("batch"), mesh["worker"].mesh.tolist(), mesh.data().mesh.tolist(), dist.get_rank()


def test_workers_share_the_batch_and_no_gradients(plait_ranks):
    for share, workers, data, rank in plait_ranks.run(meshes, world=4):
        assert share == (rank, 4)
        assert workers == [rank % 2, rank % 2 + 2]
        assert data == [rank // 2 * 2, rank // 2 * 2 + 1]


def skipping(strategies, skipped):
    """Of each of six steps, whether it changed the same parameters to the same values on all workers."""
    trial = Trial(steps=6)
    applied = trial.apply(strategies)
    optimizer = applied.optimizer(trial.optimizer)
    together = []
    for number in range(6):
        tokens, labels = batch(number)
        index, count = applied.mesh.rank_and_size("batch")
        own = Batch(tokens.chunk(count)[index], labels.chunk(count)[index])
        applied.step(own, optimizer, skip=(lambda norm: True) if number + 1 == skipped else None)
        first = next(iter(applied.parameters())).detach().clone()
        values = [torch.zeros_like(first) for _ in range(count)]
        dist.all_gather(values, first)
        together.append(all(torch.equal(value, first) for value in values))
    return together


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco"])
def test_workers_meet_after_the_next_step_if_one_is_skipped(plait_ranks, strategy):
    """Every third step, of which the third is skipped."""
    found = plait_ranks.run(skipping, {strategy: {"every": 3}}, 3, world=2)
    assert found == [[False, False, False, True, False, True]] * 2
