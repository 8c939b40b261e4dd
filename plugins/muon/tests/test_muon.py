"""Muon takes the steps of one process in every layout, and there those of torch's Muon and AdamW."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from plait.testing import Layout, OptimizerSuite
from plait_muon.muon import Muon

FSDP2, TENSOR, EXPERT = {"fsdp2": {}}, {"tensor_parallel": {"degree": 2}}, {"expert_parallel": {"degree": 2}}
MATRICES = {  # shape, logical axes, and block
    "wide": ((6, 9), ("embed", "ffn"), "layers.0"),
    "tall": ((9, 6), ("ffn", "embed"), "layers.0"),
    "experts": ((3, 4, 7), ("experts", "ffn", "embed"), "layers.1"),
}
OTHERS = {
    "norm": ((6,), ("embed",), "layers.0"),
    "windows": ((3, 4, 5), (None, "embed", None), "layers.0"),
    "head": ((8, 6), ("vocab", "embed"), None),
    "a head in a block": ((8, 6), ("vocab", "embed"), "layers.0"),
}
SMALL = ("launch.device=cpu", "model.n_layers=1", "model.dim=32", "train.seq_len=16", "train.local_batch_size=2")


class TestMuon(OptimizerSuite):
    """With all that is an option, and several buckets; tests/test_layouts.py has many more layouts."""

    optimizer: ClassVar = {
        "_target_": "plait_muon.muon.Muon",
        **{"lr": 0.01, "adamw_lr": 0.005, "normuon": True, "split": "heads", "bucket": 500},
    }
    model = "moe"
    layouts: ClassVar = {
        "experts and shards of tensor ranks": Layout(4, beside={**EXPERT, **TENSOR, **FSDP2}),
        "tensor ranks": Layout(2, beside=TENSOR),
    }


def drawn(shape, step, dtype):
    """The value (step 0) or a gradient of a parameter."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def ours(kind, value, **options):
    _, logical, block = kind
    param = nn.Parameter(value.clone())
    named = {"params": [param], "names": ["a"], "logical": [logical], "block": [block], "mesh": None}
    named |= {"units": [options.pop("units", (1,) * len(logical))], "holders": None, **options.pop("group", {})}
    return [param], Muon([named], lr=0.05, **{"weight_decay": 0.3, **options})


def of_muon(value):
    """torch's takes the matrices of experts one by one."""
    params = [nn.Parameter(each) for each in (value if value.dim() == 3 else [value])]
    return params, torch.optim.Muon(params, lr=0.05, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")


def of_adamw(value, lr=0.05, decay=0.3):
    params = [nn.Parameter(value)]
    return params, torch.optim.AdamW(params, lr=lr, weight_decay=decay, betas=(0.9, 0.95))


def end(made, start):
    """The values after four steps, those of several parameters as one."""
    params, optimizer = made
    for step in range(1, 5):
        grads = drawn(start.shape, step, start.dtype).view(len(params), *params[0].shape)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
    return torch.stack([param.detach() for param in params]).view(start.shape)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-2)])
def test_each_parameter_goes_as_torchs_optimizer_takes_it(monkeypatch, dtype, bound):
    if dtype == torch.float64:  # torch's Muon computes in bfloat16, whatever it gets
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        monkeypatch.setattr(torch, "bfloat16", torch.float64)  # from 2.15 on it is named so
    matrices, others, own = MATRICES.values(), OTHERS.values(), {"lr": 0.02, "weight_decay": 0.0}
    same = {"lr": 0.05, "weight_decay": 0.3}  # as the optimizer's, but said by the group
    for kind, theirs, options in (
        *((kind, of_muon, {}) for kind in matrices),
        *((kind, of_adamw, {}) for kind in others),
        *((kind, of_adamw, {"matrices": False}) for kind in matrices),
        *((kind, lambda x: of_adamw(x, 0.01, 0.2), {"adamw_lr": 0.01, "adamw_weight_decay": 0.2}) for kind in others),
        (OTHERS["norm"], lambda x: of_adamw(x, 0.02, 0.0), {"adamw_lr": 0.01, "adamw_weight_decay": 0.2, "group": own}),
        (
            OTHERS["norm"],
            lambda x: of_adamw(x, 0.05, 0.3),
            {"adamw_lr": 0.01, "adamw_weight_decay": 0.2, "group": same},
        ),
    ):
        start = drawn(kind[0], 0, dtype)
        got = end(ours(kind, start, **options), start)
        expected = end(theirs(start.clone()), start)
        assert (got - expected).norm() <= bound * (expected - start).norm(), (kind, options)


@pytest.mark.parametrize("dim", [0, 1])
def test_heads_are_matrices_of_their_own(dim):
    """Those of a dim go as parameters of their own would."""
    shape, axes, units = [(6, 8), (8, 6)][dim], ["embed", "embed"], [1, 1]
    axes[dim], units[dim] = "heads", 3
    kind, start = (shape, tuple(axes), "layers.0"), drawn(shape, 0, torch.float64)
    param, optimizer = ours(kind, start, split="heads", units=tuple(units), normuon=True)
    apart = [ours(kind, part, normuon=True) for part in start.chunk(3, dim)]
    for step in range(1, 4):
        param[0].grad = drawn(shape, step, torch.float64)
        for ((own,), _), grad in zip(apart, param[0].grad.chunk(3, dim), strict=True):
            own.grad = grad
        for each in (optimizer, *(made for _, made in apart)):
            each.step()
    torch.testing.assert_close(param[0], torch.cat([own for (own,), _ in apart], dim), rtol=1e-12, atol=0)


def test_parameters_may_be_stepped_in_pieces():
    """As by what rounds states to bfloat16. Here the heads of one divide its rows, those of the other its columns."""
    each = {"names": ["wq", "wo"], "logical": [("heads", "embed"), ("embed", "heads")], "units": [(2, 1), (1, 2)]}

    def stepped(pieces):
        params = [nn.Parameter(drawn((8, 8), 0, torch.float64)) for _ in range(2)]
        group = {"params": params, **each, "block": ["layers.0"] * 2, "mesh": None, "holders": None}
        optimizer = Muon([group], lr=0.05, split="heads")
        for param in params:
            param.grad = drawn((8, 8), 1, torch.float64)
        (whole,) = optimizer.param_groups
        for numbers in pieces:
            part = {key: [whole[key][i] for i in numbers] for key in ("params", *each, "block")}
            optimizer.param_groups = [{**whole, **part}]
            optimizer.step()
        return torch.stack([param.detach() for param in params])

    assert torch.equal(stepped([[0], [1]]), stepped([[0, 1]]))


@pytest.mark.parametrize(("scale", "size"), [("rms", 0.2 * 4), ("rows", 2.0), ("spectral", 2.0)])
def test_normuon_keeps_the_size_of_an_update(scale, size):
    """16 rows, 4 columns, singular values of 1: 4 times the size is the norm of the update."""
    kind, start = ((16, 4), ("ffn", "embed"), "layers.0"), drawn((16, 4), 0, torch.float64)
    (param,), optimizer = ours(kind, start, normuon=True, scale=scale, weight_decay=0.0)
    param.grad = drawn((16, 4), 1, torch.float64)
    optimizer.step()
    assert float((param.detach() - start).norm()) == pytest.approx(0.05 * size * 2, rel=1e-6)
    (rows,) = optimizer.state[param]["rows"]
    assert float(rows.sum()) == pytest.approx(0.05 * 1, rel=0.3)  # of the mean squares of an orthogonal matrix


def test_options_that_do_not_fit(plait_project):
    wrong = {"precision": "half", "momentum": 1.5, "split": "rows", "scale": "large", "bucket": 0, "iterations": 0}
    wrong |= {"betas": (0.9, 2.0), "eps": -1.0, "weight_decay": -0.1, "adamw_lr": -1.0, "adamw_weight_decay": -0.1}
    for key, value in wrong.items():
        with pytest.raises(ValueError, match=f"^{key} must be "):
            ours(MATRICES["wide"], torch.zeros(6, 9), **{key: value})
    with pytest.raises(ValueError, match=r"^adamw_weight_decay needs a weight_decay above 0"):
        ours(MATRICES["wide"], torch.zeros(6, 9), weight_decay=0.0, adamw_weight_decay=0.1)
    done = plait_project("train", "optimizer=muon", "optimizer.precision=half", *SMALL)
    assert (done.code, done.error.key) == (1, "optimizer.precision"), done.err
    with pytest.raises(ValueError, match=r"give it the groups of applied\.groups\(\)"):
        Muon([nn.Parameter(torch.zeros(2, 2))], lr=0.1)


@pytest.mark.slow
def test_a_run(plait_project):
    """In bfloat16, with a rule of its own for one matrix of each block."""
    rule = "optimizer.groups={layers.*.attention.wq.weight: {matrices: false, lr: 0.001}}"
    run = ("optimizer=muon", rule, "strategy=[fsdp2]", "train.steps=3", "validation.interval=0", *SMALL)
    done = plait_project("train", *run, "run.name=a", "metrics.tensorboard=false", ranks=2)
    assert done.code == 0, done.err
    assert [row["step"] for row in plait_project.rows("a")] == [1, 2, 3]


@pytest.mark.slow
def test_it_is_planned(plait_project):
    """All blocks are traced: rank 0 of many has the same first matrix, whatever their number."""
    small = [setting for setting in SMALL if not setting.startswith("model.n_layers")]
    done = plait_project(
        "plan", "optimizer=muon", "strategy=[fsdp2]", "cluster=h100", "world=64", "model.n_layers=6", *small
    )
    assert "6 of 6 blocks" in done.out, done.err
    assert "aten::baddbmm" in done.out
