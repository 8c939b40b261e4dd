"""A model with its adapters added to it, whole and divided among ranks."""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from plait import whole_tensor
from plait_lora.exported import merged
from plait_lora.options import LoraOptions

OPTIONS = LoraOptions(rank=2, alpha=6.0)
run: Any = None  # nothing of it is read


def state():
    """A matrix, a stack of matrices, and a parameter without adapters: float32, adapters in float64."""
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(6, 4),
        "a.lora_A": torch.randn(2, 4).double(),
        "a.lora_B": torch.randn(6, 2).double(),
        "experts.w": torch.randn(4, 6, 2),
        "experts.w_lora_A": torch.randn(4, 2, 2).double(),
        "experts.w_lora_B": torch.randn(4, 6, 2).double(),
        "norm.weight": torch.randn(4),
    }


def by_hand(given):
    def added(weight, down, up):
        return (weight.double() + 3.0 * up @ down).float()

    return {
        "a.weight": added(*(given[f"a.{name}"] for name in ("weight", "lora_A", "lora_B"))),
        "experts.w": added(*(given[f"experts.w{name}"] for name in ("", "_lora_A", "_lora_B"))),
        "norm.weight": given["norm.weight"],
    }


def test_a_plain_model_has_the_products_added():
    found = merged(OPTIONS, state(), run).tensors
    assert found.keys() == by_hand(state()).keys()
    assert all(torch.equal(tensor, by_hand(state())[name]) for name, tensor in found.items())


def divided():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    places = {"a.lora_A": Shard(1), "a.lora_B": Replicate(), "norm.weight": Replicate()}
    given = {name: distribute_tensor(t, mesh, [places.get(name, Shard(0))]) for name, t in state().items()}
    found = merged(OPTIONS, given, run).tensors
    assert all(found[name].placements == given[name].placements for name in found)
    return {name: whole_tensor(tensor) for name, tensor in found.items()}


def test_a_rank_adds_its_part(plait_ranks):
    for found in plait_ranks.run(divided, world=2):
        assert all(torch.equal(tensor, by_hand(state())[name]) for name, tensor in found.items())
