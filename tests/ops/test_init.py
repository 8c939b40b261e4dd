"""Init functions fill what they are given, compare by value and can be pickled."""

import pickle

import pytest
import torch
from torch import nn

from plait.contract.model_spec import ModelSpec
from plait.ops import Constant, Normal, TruncNormal, ones, zeros
from plait.parallel.initialize import initialise, materialise


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


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3))
        self.register_buffer("bias", torch.empty(4))


@pytest.mark.parametrize(("storage", "stored", "computed"), [("cpu", "cpu", "meta"), (None, "meta", "meta")])
def test_buffers_lie_where_the_model_computes_and_parameters_where_they_are_stored(storage, stored, computed):
    """Here the meta device is what computes: no GPU is needed for it."""
    with torch.device("meta"):
        model = Buffered()
    materialise(model, "meta", storage)
    assert (model.weight.device.type, model.bias.device.type) == (stored, computed)


def test_random_buffers_are_drawn_on_the_cpu_and_copied():
    """A generator of the CPU draws nothing into a tensor of a GPU; the meta device stands for one."""
    seen = []

    def fn(tensor, generator):
        seen.append(tensor.device.type)
        return tensor.normal_(generator=generator)

    with torch.device("meta"):
        model = nn.Module()
        model.register_buffer("bias", torch.empty(4))
    initialise(model, ModelSpec(axes={}, init={"bias": fn}), seed=0)
    assert seen == ["cpu"]
