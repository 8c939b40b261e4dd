"""What is zero's alone: both stages beside every axis, who updates what, and state that any layout goes on with."""

import sys
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import plait
from plait import ModelSpec, PlaitError
from plait.host import Saver, Store, load, make_optimizer
from plait.ops import Normal
from plait.testing import Trial, full, take_step, train, unequal, worst_gradient
from plait_testing.trial import held, of_all_stages
from plait_zero import Zero

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test

EXACT = 1e-12  # of a gradient, and of the largest element of a parameter
BESIDE = {
    "alone": ("tied", 4, {}),
    "tensor": ("llama3", 4, {"tensor_parallel": {"degree": 2}}),
    "context": ("llama3", 4, {"context_parallel": {"degree": 2}}),
    "pipeline": ("llama3", 4, {"pipeline": {"degree": 2}}),
    "experts": ("moe", 4, {"expert_parallel": {"degree": 2}}),
    "experts and tensors": ("moe", 4, {"expert_parallel": {"degree": 2}, "tensor_parallel": {"degree": 2}}),
}


def furthest(found, expected):
    """(how far the worst tensor is off, as a part of its largest element; its name)."""
    assert found.keys() == expected.keys()
    off = {n: float((found[n] - e).abs().max() / e.abs().max().clamp(min=1e-30)) for n, e in expected.items()}
    return max((error, name) for name, error in off.items())


QUICK = {("tensor", 2), ("pipeline", 1)}  # alone: in the suite


@pytest.mark.parametrize(
    ("beside", "stage"),
    [
        pytest.param(beside, stage, marks=[] if (beside, stage) in QUICK else pytest.mark.slow)
        for beside in BESIDE
        for stage in (1, 2)
    ],
)
def test_gradients_and_parameters_are_those_of_one_process(plait_ranks, beside, stage):
    model, world, others = BESIDE[beside]
    trial = Trial(model, micro=2, last=True)
    (one,) = plait_ranks.once(train, Trial(model, last=True), {}, world=1)
    for result in plait_ranks.run(train, trial, {"zero": {"stage": stage}, **others}, world=world):
        error, name = worst_gradient(result, one)
        assert error <= EXACT, f"the gradient of {name} is off by {error:.2e}"
        error, name = furthest(result.final, one.final)
        assert error <= EXACT, f"{name} is off by {error:.2e}"


def saved(strategies, folder):
    """Two steps, a checkpoint, and what a third makes of the parameters."""
    trial = Trial()
    applied = trial.apply(strategies)
    optimizer = applied.optimizer(trial.optimizer)
    for step in range(2):
        take_step(applied, optimizer, trial, step)
    Saver(Store(folder), "sync").save(applied.checkpoint(optimizer)[0], 2)
    return gone_on(applied, optimizer)


def resumed(strategies, folder):
    """(what the checkpoint of `folder` holds, loaded; what a third step makes of the parameters)."""
    trial = Trial(seed=1)
    applied = trial.apply(strategies)
    optimizer = applied.optimizer(trial.optimizer)
    load(Store(folder).latest(), *applied.checkpoint(optimizer))
    state = {key: full(tensor) for key, tensor in applied.checkpoint(optimizer)[0].items()}
    applied.steps = 2
    return of_all_stages(applied, state), gone_on(applied, optimizer)


def gone_on(applied, optimizer):
    take_step(applied, optimizer, Trial(), 2)
    return held(applied)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategies", "world"),
    [
        ({"zero": {}, "tensor_parallel": {"degree": 2}}, 4),
        ({"zero": {}}, 4),
        ({}, 1),
        ({"zero": {"stage": 1}}, 2),
        ({"zero": {}, "pipeline": {"degree": 2}}, 4),
        ({"fsdp2": {}}, 2),
        ({"ddp": {}}, 4),
    ],
    ids=str,
)
def test_any_layout_goes_on_and_back(plait_ranks, tmp_path, strategies, world):
    expected = plait_ranks.run(saved, strategies, tmp_path, world=world)[0]
    states = []
    for other, ranks in (({"zero": {}}, 2), ({"zero": {"stage": 1}}, 4), ({"fsdp2": {}}, 4), ({}, 1)):
        for state, after in plait_ranks.run(resumed, other, tmp_path, world=ranks):
            states.append(state)
            assert unequal(state, states[0]) is None
            error, name = furthest(after, expected)
            assert error <= EXACT, f"{name} is off by {error:.2e} after a step under {other}"


def of_optimizer(options, node):
    """Of each parameter: whether its shard is a view of it, and the sizes of what this rank keeps of it."""
    applied = Trial("odd").apply({"zero": options})
    optimizer = applied.optimizer(partial(make_optimizer, node))
    take_step(applied, optimizer, Trial("odd"), 0)
    params, found = dict(applied.parts[0].named_parameters()), {}
    for group in optimizer.param_groups:
        assert group["mesh"] == group["params"][0].device_mesh
        for name, shard in zip(group["names"], group["params"], strict=True):
            views = shard.to_local().untyped_storage().data_ptr() == params[name].untyped_storage().data_ptr()
            kept = [t.to_local().numel() for t in optimizer.state[shard].values() if isinstance(t, DTensor)]
            found[name] = views, shard.to_local().numel(), kept, params[name].numel()
    same = [torch.equal(full(p), p) and p.grad is None for p in params.values()]
    return found, all(same)


ADAMW = {"_target_": "torch.optim.AdamW", "lr": 1e-2}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_each_rank_keeps_the_state_of_its_share(plait_ranks, stage):
    answers = plait_ranks.run(of_optimizer, {"stage": stage}, ADAMW, world=4)
    assert all(same for _, same in answers)
    for name in answers[0][0]:
        _, _, _, whole = answers[0][0][name]
        assert sum(found[name][1] for found, _ in answers) == whole
        for found, _ in answers:
            views, own, kept, _ = found[name]
            assert kept == [own, own]
            assert views or own < whole


def refusal(node, apply=True):
    applied = Trial().apply({"zero": {}})
    make: Any = partial(make_optimizer, node)
    try:
        take_step(applied, applied.optimizer(make) if apply else make(applied.groups()), Trial(), 0)
    except PlaitError as error:
        return str(error)
    return None


def test_an_optimizer_that_takes_a_share_for_the_whole_is_refused_by_name(plait_ranks):
    for said in plait_ranks.run(refusal, {"_target_": "tests.helpers.strange.NumberLars", "lr": 0.1}, world=2):
        assert "tests.helpers.strange.NumberLars makes a different step on a shard than on the whole" in said


def test_another_optimizer_than_its_own_is_refused(plait_ranks):
    for said in plait_ranks.run(refusal, ADAMW, False, world=2):
        assert said.startswith("strategy 'zero'")
        assert "makes the run's optimizer" in said


class Branching(nn.Module):
    """`used` takes part on every rank, `sometimes` where it is told to, `never` nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.sometimes, self.used = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x, both):
        return self.used(x) + (self.sometimes(x) if both else 0)

    def spec(self):
        return ModelSpec(axes={"*.weight": ("embed", "embed")}, init={"*.weight": Normal(0.1)})


def without_gradients(stage):
    with torch.device("meta"):
        model = Branching()
    plait.apply(model, model.spec(), [Zero(stage=stage)])
    rank = dist.get_rank()
    for repeat in range(2):
        model(torch.full((1, 4), rank + 1.0), both=rank == repeat).sum().backward()
    return {name: None if p.grad is None else full(p.grad).unique().tolist() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_that_only_one_rank_used(plait_ranks, stage):
    """Two backward passes: of the first `sometimes` has a gradient on rank 0 alone, of the second on rank 1."""
    for found in plait_ranks.run(without_gradients, stage, world=2):
        assert found == {"never.weight": None, "sometimes.weight": [1.0 + 2.0], "used.weight": [2 * (1.0 + 2.0)]}


def scalar():
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(()))
    model.forward = lambda x: model.scale * x
    spec = ModelSpec(axes={"scale": ()}, init={"scale": Normal(0.1)})
    with pytest.raises(PlaitError, match=r"cannot divide the scalar 'scale'"):
        plait.apply(model, spec, [Zero()]).parts[0](torch.ones(2))
    return True


def test_a_scalar_is_refused(plait_ranks):
    assert plait_ranks.run(scalar, world=2) == [True, True]
