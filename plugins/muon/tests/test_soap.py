"""SOAP takes the steps of one process in every layout, and its bases are eigenvectors."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from plait.testing import Layout, OptimizerSuite
from plait_muon.soap import Soap, renewed

FSDP2, TENSOR, EXPERT = {"fsdp2": {}}, {"tensor_parallel": {"degree": 2}}, {"expert_parallel": {"degree": 2}}


class TestSoap(OptimizerSuite):
    """With bases that are renewed after a checkpoint too, and several buckets."""

    optimizer: ClassVar = {"_target_": "plait_muon.soap.Soap", "lr": 0.01, "every": 2, "bucket": 500}
    model = "moe"
    slow: ClassVar = ("test_a_run_goes_on",)  # muon's suite has it
    layouts: ClassVar = {
        "experts and shards of tensor ranks": Layout(4, beside={**EXPERT, **TENSOR, **FSDP2}),
        "stages of experts": Layout(4, beside={"pipeline": {"degree": 2}, **EXPERT, **FSDP2}),
        "shards of states": Layout(2, beside={"zero": {}}),
        "copies": Layout(2, beside={"ddp": {}}),
    }


def test_bases_become_eigenvectors():
    values = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    factor = values @ values.mT
    basis = None
    for _ in range(2000):
        basis = renewed(factor, basis)
    inside = basis.mT @ factor @ basis
    torch.testing.assert_close(inside, inside.diagonal().diag(), rtol=0, atol=1e-6)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(6, dtype=torch.float64))


def test_in_the_eigenbasis_it_is_adam():
    """A gradient that is diagonal from the start has the axes as its eigenvectors."""
    start = torch.zeros(4, 4, dtype=torch.float64)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    group = {"params": [ours], "names": ["a"], "logical": [("ffn", "embed")], "block": ["layers.0"], "mesh": None}
    soap = Soap([{**group, "units": [(1, 1)], "holders": None}], lr=0.1, weight_decay=0.0, every=1)
    adam = torch.optim.Adam([theirs], lr=0.1, betas=(0.95, 0.95), eps=1e-8)
    for step in range(1, 4):
        for param in (ours, theirs):
            param.grad = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64) / step)
        soap.step()
        adam.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_options_that_do_not_fit():
    for options in ({"every": 0}, {"betas": (0.9, 1.0)}):
        group = {
            "params": [nn.Parameter(torch.zeros(2, 2))],
            "names": ["a"],
            "logical": [(None, None)],
            "block": [None],
        }
        with pytest.raises(ValueError, match=f"^{next(iter(options))} must be "):
            Soap([{**group, "block": [None], "mesh": None, "units": [(1, 1)], "holders": None}], lr=0.1, **options)
