"""What does not train is not saved, and is loaded if a checkpoint has it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from plait.checkpoint import frozen_parameters as frozen_parts
from plait.checkpoint.frozen_parameters import Base, digest
from plait.checkpoint.load import load
from plait.checkpoint.save import Saver
from plait.checkpoint.store import Store
from plait.parallel.state import canonical_state
from plait.testing import raises_about

CONFIG = {"checkpoint": {"init_from": "before.safetensors"}}


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def frozen(seed: int):
    """(model, state, base): the first layer does not train."""
    model = net(seed)
    model[0].requires_grad_(False)
    state, _ = canonical_state(model)
    return model, state, Base.of(state, SimpleNamespace(parts=[model]))


def test_everything_trains():
    state, _ = canonical_state(net(0))
    assert Base.of(state, SimpleNamespace(parts=[net(0)])) is None


def test_a_checkpoint_holds_what_trains(tmp_path):
    model, state, base = frozen(0)
    base.check(state, None, None)
    fresh, _ = canonical_state(model)
    saved, known, _ = base.without(fresh, ["0.weight", "1.weight"])
    assert (set(saved), known) == ({"model.1.weight", "model.1.bias"}, ["1.weight"])
    Saver(Store(tmp_path), "sync").save(saved, 1, config=CONFIG, data={"frozen": base.digest})

    _, state, again = frozen(0)
    load(tmp_path / "step-1", state)
    again.check(state, tmp_path / "step-1", None)
    other, state, another = frozen(1)
    with raises_about("checkpoint.init_from", "now", ("before.safetensors",)):
        another.check(state, tmp_path / "step-1", "now")
    load(tmp_path / "step-1", state)
    assert torch.equal(other[1].weight, model[1].weight)


def test_what_was_saved_while_it_trained_is_loaded(tmp_path):
    whole = net(0)
    Saver(Store(tmp_path), "sync").save(canonical_state(whole)[0], 1)
    model, state, base = frozen(1)
    load(tmp_path / "step-1", state)
    base.check(state, tmp_path / "step-1", None)
    assert torch.equal(model[0].weight, whole[0].weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_digest_sees_every_bit_and_place(dtype):
    def of(change) -> str:
        model, _, _ = frozen(0)
        model.to(dtype)
        change(model[0].weight.data)
        state, _ = canonical_state(model)
        Base.of(state, SimpleNamespace(parts=[model]))
        return digest(state)

    def one_bit(weight):
        weight[2, 1] = torch.nextafter(weight[2, 1].float(), torch.tensor(9.0)) if dtype != torch.bfloat16 else 1.5

    seen = [of(lambda weight: None), of(one_bit), of(lambda w: w.copy_(w.flip(0))), of(lambda w: w.copy_(w.flip(1)))]
    assert len(set(seen)) == 4
    assert of(lambda weight: None) == seen[0]


def test_a_digest_is_the_same_however_much_is_mixed_at_once(monkeypatch):
    model, state, _ = frozen(0)
    Base.of(state, SimpleNamespace(parts=[model]))
    whole = digest(state)
    for elements in (1, 3, 7):
        monkeypatch.setattr(frozen_parts, "AT_ONCE", elements)
        assert digest(state) == whole


def test_a_digest_is_what_earlier_versions_saved():
    """Otherwise no checkpoint of theirs would fit."""
    model, state, _ = frozen(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(param.numel()).view(param.shape) / 8)
    Base.of(state, SimpleNamespace(parts=[model]))
    assert digest(state) == "c48c5c4ed0b499c2"
