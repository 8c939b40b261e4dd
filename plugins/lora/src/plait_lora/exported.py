"""What a run with adapters exports: the adapters alone, as peft names them, or the model with them added."""

import json
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from plait import Export, Run, held_indices, whole_tensor
from plait_lora.names import SUFFIXES, pair
from plait_lora.options import LoraOptions

PREFIX = "base_model.model."  # of peft's names


def adapters(options: LoraOptions, state: dict[str, Tensor], run: Run) -> Export:
    """`adapter_model.safetensors` and `adapter_config.json`. Experts' stacks keep Plait's shape, which peft lacks."""
    tensors = {_renamed(fqn): tensor for fqn, tensor in state.items() if fqn.endswith(SUFFIXES)}
    modules = [fqn.removesuffix(f".{SUFFIXES[0]}") for fqn in run.added if fqn.endswith(f".{SUFFIXES[0]}")]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": run.config.checkpoint.init_from,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted(modules),
    }
    return Export(tensors, {"adapter_config.json": json.dumps(config, indent=2) + "\n"}, "adapter_model")


def _renamed(fqn: str) -> str:
    return f"{PREFIX}{fqn}{'.weight' if fqn.endswith(tuple(f'.{suffix}' for suffix in SUFFIXES)) else ''}"


@torch.no_grad()
def merged(options: LoraOptions, state: dict[str, Tensor], run: Run) -> Export:
    """All weights, with W + scale B A for each adapted W: a plain model. A rank holds its part of those twice."""
    whole = {fqn: tensor for fqn, tensor in state.items() if not fqn.endswith(SUFFIXES)}
    for fqn, weight in whole.items():
        names = pair(fqn)
        if names[0] in state:
            down, up = (_whole(state[name]) for name in names)
            whole[fqn] = _added(weight, down, up, options.scale)
    return Export(whole)


def _whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        on_mesh: Any = tensor.to(tensor.device_mesh.device_type)  # it may be stored elsewhere
        tensor = whole_tensor(on_mesh)
    return tensor.double()


def _added(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """This rank's part of `weight` + scale `up` `down`, computed in float64, in the dtype of `weight`."""
    *stack, rows, columns = (held_indices(weight, dim).to(up.device) for dim in range(weight.dim()))
    for indices in stack:
        down, up = down.index_select(0, indices), up.index_select(0, indices)
    product = scale * (up.index_select(-2, rows) @ down.index_select(-1, columns))
    if not isinstance(weight, DTensor):
        return (weight.double() + product).to(weight.dtype)
    local = (weight.to_local().to(product) + product).to(weight.dtype)
    mesh, shape, stride = weight.device_mesh, weight.shape, weight.stride()
    return DTensor.from_local(local, mesh, weight.placements, run_check=False, shape=shape, stride=stride)
