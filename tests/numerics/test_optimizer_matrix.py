"""Every optimizer under every kind of layout takes the steps of one process, or is refused in one sentence.

The bound, stated before it was measured: in float64 no parameter is off by more than 1e-10 of the way that it went.
"""

import functools
import re
from unittest import mock

import attrs
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from plait.contract.errors import PlaitError
from plait.parallel.group import part_of
from plait.train.optimizer import make_optimizer
from plait_testing.models import moe
from plait_testing.trial import Trial, full, take_step, whole

STRANGE = "tests.helpers.strange"
BOUND = 1e-10
LAYOUTS = {
    "fsdp2": ("llama3", 2, {"fsdp2": {}}),
    "hsdp": ("llama3", 4, {"fsdp2": {"replicate": 2}}),
    "tensor_parallel": ("llama3", 2, {"tensor_parallel": {"degree": 2}}),
    "tensor_parallel x fsdp2": ("llama3", 4, {"tensor_parallel": {"degree": 2}, "fsdp2": {}}),
    "expert_parallel x fsdp2": (moe, 4, {"expert_parallel": {"degree": 2}, "fsdp2": {}}),
    "simplefsdp": ("llama3", 4, {"simplefsdp": {}}),
    "ddp": ("llama3", 2, {"ddp": {}}),
    "zero": ("llama3", 2, {"zero": {}}),
}
NODES = {
    "AdamW": {"_target_": "torch.optim.AdamW", "lr": 1e-2, "fused": None},
    "SGD": {"_target_": "torch.optim.SGD", "lr": 1e-1, "momentum": 0.9, "weight_decay": 0.1, "fused": None},
    "Adafactor": {"_target_": "torch.optim.Adafactor", "lr": 1e-1},
    "a stranger's": {"_target_": f"{STRANGE}.Momentum", "lr": 1e-1, "fused": None},
    "a stranger's with norms": {"_target_": f"{STRANGE}.Lars", "lr": 1e-1},
    "a stranger's with norms as numbers": {"_target_": f"{STRANGE}.NumberLars", "lr": 1e-1},
    "Adam": {"_target_": "torch.optim.Adam", "lr": 1e-2},
    "RMSprop": {"_target_": "torch.optim.RMSprop", "lr": 1e-2},
    "Adagrad": {"_target_": "torch.optim.Adagrad", "lr": 1e-2},
    "Adadelta": {"_target_": "torch.optim.Adadelta", "lr": 1.0},
    "Adamax": {"_target_": "torch.optim.Adamax", "lr": 1e-2},
    "NAdam": {"_target_": "torch.optim.NAdam", "lr": 1e-2},
    "RAdam": {"_target_": "torch.optim.RAdam", "lr": 1e-2},
    "ASGD": {"_target_": "torch.optim.ASGD", "lr": 1e-2},
    "Rprop": {"_target_": "torch.optim.Rprop", "lr": 1e-2},
    "Muon": {"_target_": "torch.optim.Muon", "lr": 1e-2},
}
OFTEN = ["SGD", "Adafactor", "a stranger's", "a stranger's with norms as numbers"]
DIVIDED = {  # what is refused where a parameter is divided, and why
    "Adafactor": r"torch\.optim\.Adafactor (cannot make a step on DTensors .*Shard.*: |makes a different step on)",
    "Rprop": r"torch\.optim\.Rprop cannot make a step on DTensors .*Shard.*: ",
    "a stranger's with norms as numbers": r".*strange\.NumberLars makes a different step on a shard than on the whole",
}
# An optimizer of matrices alone, of which a strategy makes its own, which must train every parameter.
UNNAMED = {("zero", "Muon"): r"strategy 'zero' .* do not name 'layers\.0\.attention_norm\.weight' and 4 more, .*"}
HINT = "take one that works element by element, such as torch.optim.AdamW, or a layout that divides no parameters"


@attrs.frozen
class Answer:
    refusal: str | None = None
    start: dict[str, torch.Tensor] = attrs.Factory(dict)
    end: dict[str, torch.Tensor] = attrs.Factory(dict)


def newton_schulz(grad, coefficients, steps, eps):
    """torch's own computes in bfloat16, where the order of a sum shows; this one in what it is given."""
    a, b, c = coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if grad.size(0) > grad.size(1) else x


def answers(model, strategies, names, steps=3):
    """Optimizer -> what came of it on this rank."""
    from torch.optim import _muon

    found = {}
    trial = Trial(model)
    applied = trial.apply(strategies)
    (part,) = applied.parts
    start = whole(part)
    fresh = [(t, t.detach().clone()) for t in (*part.parameters(), *part.buffers())]
    for name in names:
        with torch.no_grad():
            for tensor, value in fresh:
                tensor.copy_(value)
                tensor.grad = None
        try:
            optimizer = applied.optimizer(functools.partial(made, name))
        except PlaitError as error:
            found[name] = Answer(str(error))
            continue
        with mock.patch.object(_muon, "_zeropower_via_newtonschulz", newton_schulz):
            for step in range(steps):
                take_step(applied, optimizer, trial, step)
        found[name] = Answer(None, start, whole(part))
    return found


def made(name, groups):
    """Muon takes matrices alone."""
    each = ((group, [i for i, p in enumerate(group["params"]) if name != "Muon" or p.dim() == 2]) for group in groups)
    return make_optimizer(NODES[name], [part_of(group, numbers) for group, numbers in each if numbers])


def one_process(ranks, model, names):
    key = ("optimizers of one process", str(model), *names)
    if key not in ranks.kept:
        (ranks.kept[key],) = ranks.run(answers, model, {}, names, world=1)
    return ranks.kept[key]


def compared(ranks, layout, names):
    model, world, strategies = LAYOUTS[layout]
    expected = one_process(ranks, model, names)
    for found in ranks.run(answers, model, strategies, names, world=world, timeout=280):
        for name in names:
            wanted = UNNAMED.get((layout, name))
            if layout != "ddp" and name in DIVIDED:
                wanted = f"optimizer: {DIVIDED[name]}.*{HINT}"
            if wanted:
                assert re.fullmatch(wanted, str(found[name].refusal)), found[name].refusal
            else:
                same_steps(name, found[name], expected[name])


def same_steps(name, found, one):
    assert one.refusal is None
    assert found.refusal is None, found.refusal
    for fqn, end in one.end.items():
        off, way = float((found.end[fqn] - end).norm()), float((end - one.start[fqn]).norm())
        bound = BOUND if end.dtype == torch.float64 else 1e-2
        assert off <= bound * way, f"{name}: {fqn} is off by {off:.1e}; it went {way:.1e}"


def test_the_usual_ones(plait_ranks):
    compared(plait_ranks, "fsdp2", OFTEN)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_of_them(plait_ranks, layout):
    compared(plait_ranks, layout, list(NODES))


def stepped(name, node, world):
    """Parameters whose rows do not divide, or are fewer than the ranks, with gradients that every world draws alike."""
    shapes, dtypes = [(7, 3), (1, 5), (9,), (2, 2)], [torch.float64, torch.float64, torch.float64, torch.bfloat16]
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("rows",)) if world > 1 else None

    def drawn(i, step):
        value = torch.randn(shapes[i], generator=torch.Generator().manual_seed(10 * i + step)).to(dtypes[i])
        return value if mesh is None else distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)

    params = [nn.Parameter(drawn(i, 0)) for i in range(len(shapes)) if name != "Muon" or len(shapes[i]) == 2]
    start = {str(i): full(p) for i, p in enumerate(params)}
    random = torch.get_rng_state()
    try:
        optimizer = make_optimizer(node, params)
    except PlaitError as error:
        return Answer(str(error))
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(full(p), start[str(i)]) and p.grad is None for i, p in enumerate(params))
    for step in range(1, 4):
        for i, p in enumerate(params):
            p.grad = drawn(i, step)
        optimizer.step()
    return Answer(None, start, {str(i): full(p) for i, p in enumerate(params)})


def all_stepped(names, world):
    return {name: stepped(name, NODES[name], world) for name in names}


def test_uneven_and_empty_shards(plait_ranks):
    names = ["AdamW", "SGD", "a stranger's", "a stranger's with norms", "Adagrad"]
    (one,) = plait_ranks.run(all_stepped, names, 1, world=1)
    for found in plait_ranks.run(all_stepped, names, 4, world=4):
        for name in names:
            same_steps(name, found[name], one[name])


SGD = NODES["SGD"]
ON = "cannot make a step on DTensors of 2 dim(s), float64, on cpu, Shard(dim=0) over rows and 2 other kind(s): "
REFUSED = {
    f"optimizer.fused=true: torch.optim.SGD {ON}NotImplementedError: Operator aten._fused_sgd_.default does not have a "
    "sharding strategy registered; null chooses kernels that work": {**SGD, "fused": True},
    f"optimizer: {STRANGE}.OneRank {ON}RuntimeError: nothing to reduce; {HINT}": {"_target_": f"{STRANGE}.OneRank"},
}


def test_a_refusal_is_the_same_on_all_ranks(plait_ranks):
    for sentence, node in REFUSED.items():
        assert {found.refusal for found in plait_ranks.run(stepped, "", node, 2, world=2)} == {sentence}


def test_one_that_means_to_differ_is_not_compared(plait_ranks):
    for found in plait_ranks.run(stepped, "", {"_target_": f"{STRANGE}.OwnLars"}, 2, world=2):
        assert found.refusal is None
