"""Muon takes the steps of one process in every layout, and there those of torch's Muon and AdamW."""

from typing import ClassVar

import pytest
import torch
from plait_muon.muon import Muon
from torch import nn

from plait.testing import Layout, OptimizerSuite

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
}
SMALL = ("launch.device=cpu", "model.n_layers=1", "model.dim=32", "train.seq_len=16", "train.local_batch_size=2")


class TestMuon(OptimizerSuite):
    optimizer: ClassVar = {"_target_": "plait_muon.muon.Muon", "lr": 0.01}
    model = "moe"
    layouts: ClassVar = {
        "shards": Layout(4, beside=FSDP2),
        "copies of shards": Layout(4, beside={"fsdp2": {"replicate": 2}}),
        "simplefsdp": Layout(2, beside={"simplefsdp": {}}),
        "zero": Layout(2, beside={"zero": {}}),
        "stages of shards": Layout(4, beside={"pipeline": {"degree": 2}, **FSDP2}),
        "experts": Layout(4, beside={**EXPERT, **FSDP2}),
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
    return [param], Muon([named], lr=0.05, weight_decay=0.3, **options)


def of_muon(value):
    """torch's takes the matrices of experts one by one."""
    params = [nn.Parameter(each) for each in (value if value.dim() == 3 else [value])]
    return params, torch.optim.Muon(params, lr=0.05, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")


def of_adamw(value):
    params = [nn.Parameter(value)]
    return params, torch.optim.AdamW(params, lr=0.05, weight_decay=0.3, betas=(0.9, 0.95))


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
    matrices, others = MATRICES.values(), OTHERS.values()
    for kind, theirs, options in (
        *((kind, of_muon, {}) for kind in matrices),
        *((kind, of_adamw, {}) for kind in others),
        *((kind, of_adamw, {"matrices": False}) for kind in matrices),
    ):
        start = drawn(kind[0], 0, dtype)
        got = end(ours(kind, start, **options), start)
        expected = end(theirs(start.clone()), start)
        assert (got - expected).norm() <= bound * (expected - start).norm(), (kind, options)


def test_options_that_do_not_fit(plait_project):
    for key, value in (("precision", "half"), ("momentum", "1.5")):
        done = plait_project("train", "optimizer=muon", f"optimizer.{key}={value}", *SMALL)
        assert (done.code, done.error.key) == (1, f"optimizer.{key}"), done.err
    with pytest.raises(ValueError, match=r"give it the groups of applied\.groups\(\)"):
        Muon([nn.Parameter(torch.zeros(2, 2))], lr=0.1)


def test_a_run(plait_project):
    """In bfloat16, with a rule of its own for one matrix of each block."""
    rule = "optimizer.groups={layers.*.attention.wq.weight: {matrices: false, lr: 0.001}}"
    run = ("optimizer=muon", rule, "strategy=[fsdp2]", "train.steps=3", "validation.interval=0", *SMALL)
    done = plait_project("train", *run, "run.name=a", "metrics.tensorboard=false", ranks=2)
    assert done.code == 0, done.err
    assert [row["step"] for row in plait_project.rows("a")] == [1, 2, 3]


@pytest.mark.slow
def test_it_is_planned(plait_project):
    done = plait_project(
        "plan", "optimizer=muon", "strategy=[fsdp2]", "cluster=h100", "launch.nproc_per_node=2", *SMALL
    )
    assert "aten::baddbmm" in done.out, done.err
