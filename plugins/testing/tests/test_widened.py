"""`plait verify` compares in float64, also where a model casts to float32 by hand."""

import sys

import attrs
import cloudpickle
import pytest
import torch
from torch import nn

from plait.contract.config import Compile, Config
from plait_testing.declared import OfRun
from plait_testing.models import llama3
from plait_testing.parity import worst_gradient
from plait_testing.trial import Trial, train
from plait_testing.widened import Widened

pytest.importorskip("plait_tensor_parallel")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test


class Norm(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        wide = x.float()
        mean = torch.mean(wide.pow(2), -1, keepdim=True, dtype=torch.float32)
        return ((wide * torch.rsqrt(mean + 1e-5)).to(torch.float32) * self.weight.float()).type_as(x)


def by_hand():
    model = llama3(n_layers=1)
    for fqn, module in list(model.named_modules()):
        if isinstance(module, nn.RMSNorm):
            parent, _, name = fqn.rpartition(".")
            setattr(model.get_submodule(parent), name, Norm(module.weight))
    return model


@attrs.frozen
class Wide(Trial):
    def computing(self):
        return Widened()


def test_a_right_spec_shows_no_rounding(plait_ranks):
    def error(trial):
        (one,) = plait_ranks.run(train, trial, world=1)
        return max(worst_gradient(r, one)[0] for r in plait_ranks.run(train, trial, {"tensor_parallel": {}}, world=2))

    assert error(Trial(by_hand, steps=1)) > 1e-9  # or this tests nothing
    assert error(Wide(by_hand, steps=1, remat="full")) <= 1e-13


def test_verify_uses_it_unless_it_compiles():
    assert isinstance(OfRun(config=Config(), vocab=8, data_ranks=1).computing(), Widened)
    compiling = Config(compile=Compile(enabled=True))
    assert not isinstance(OfRun(config=compiling, vocab=8, data_ranks=1).computing(), Widened)
