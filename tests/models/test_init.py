"""Init functions fill what they are given, compare by value and can be pickled."""

import pickle

import pytest
import torch

from plait.models.init import Constant, Normal, TruncNormal, ones, zeros


def generator():
    return torch.Generator().manual_seed(3)


def test_normal():
    drawn = Normal(0.02)(torch.empty(100_000), generator())
    assert drawn.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(drawn.mean().item()) < 0.001
    assert torch.equal(drawn, Normal(0.02)(torch.empty(100_000), generator()))


def test_trunc_normal_is_cut_at_three_deviations():
    drawn = TruncNormal(0.02)(torch.empty(100_000), generator())
    assert 0.055 < drawn.abs().max().item() <= 0.06
    assert drawn.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(drawn, TruncNormal(0.02)(torch.empty(100_000), generator()))


def test_constants():
    assert zeros(torch.empty(3), generator()).tolist() == [0, 0, 0]
    assert ones(torch.empty(3), generator()).tolist() == [1, 1, 1]


@pytest.mark.parametrize("fn", [Normal(0.1), TruncNormal(0.1, cut=2.0), Constant(0.5), ones])
def test_value(fn):
    assert pickle.loads(pickle.dumps(fn)) == fn
    assert fn != Normal(0.3)
