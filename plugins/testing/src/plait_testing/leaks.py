"""What a run must not leave behind in its process: settings of torch, hooks, patches, process groups."""

import importlib
import os
import random
import signal
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from plait_testing import torch_internals
from plait_testing.torch_internals import COMPILER, all_groups, hooks_of, hooks_of_optimizer, hooks_of_tensor
from plait_testing.trial import Trial, take_step


def left_behind(trial: Trial, strategies: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a trial changed in this process permanently, in words. Needs a fresh process: a patch is made only once."""
    importlib.import_module(COMPILER)
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401 - what a strategy may import is no patch of its

    trial.build()
    settings, patches = _settings(), _attributes()
    found = _some_steps(trial, strategies)
    after = _settings()
    found += [f"{name} was {settings[name]}, is {after[name]}" for name in settings if settings[name] != after[name]]
    now = _attributes()
    found += [f"{name} was patched" for name in patches if name in now and patches[name] is not now[name]]
    return found


def _some_steps(trial: Trial, strategies: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Three steps; returns what grew from the first to the last, and process groups that the mesh does not know."""
    applied = trial.apply(strategies)
    optimizer = applied.optimizer(trial.optimizer)
    known = applied.mesh.axes_by_group(joined=True)
    counts = []
    for step in range(3):
        take_step(applied, optimizer, trial, step)
        counts.append(_hooks(applied.parts, optimizer))
    applied.checkpoint(optimizer)
    grown = [
        f"hooks on {name} grow from step to step" for name in counts[-1] if counts[-1][name] > counts[0].get(name, 0)
    ]
    own = sorted(group.group_desc or group.group_name for group in all_groups() if group.group_name not in known)
    return grown + [f"process group {name!r} does not belong to the mesh" for name in own]


def _hooks(parts: list[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    counts = {}
    for fqn, module in (
        (f"{i}: {fqn}" if i else fqn, m) for i, part in enumerate(parts) for fqn, m in part.named_modules()
    ):
        counts[f"module {fqn!r}"] = sum(hooks_of(module))
    for fqn, param in (pair for part in parts for pair in part.named_parameters()):
        counts[f"parameter {fqn!r}"] = hooks_of_tensor(param)
    counts["the optimizer"] = hooks_of_optimizer(optimizer)
    return counts


def _settings() -> dict[str, Any]:
    """The global state of torch and of the process, by readable names."""
    active = torch_internals.modes()
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_autocast_enabled()": torch.is_autocast_enabled("cpu"),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "torch.backends.cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "torch.__future__, swapping parameters": torch.__future__.get_swap_module_params_on_conversion(),
        "torch's random state (hash)": hash(torch.get_rng_state().numpy().tobytes()),
        "Python's random state (hash)": hash(random.getstate()),
        "numpy's random state (hash)": hash(str(np.random.get_state(legacy=False))),
        "global hooks of torch.nn.Module": torch_internals.global_hooks(),
        "active torch function modes": active["function"],
        "active torch dispatch modes": active["dispatch"],
        "environment variables": {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TORCHINDUCTOR"))},
        "handler of SIGTERM": signal.getsignal(signal.SIGTERM),
    }


def _attributes() -> dict[str, Any]:
    """The functions and classes of torch that strategies are likely to patch, by name."""
    import torch.nn.functional as F
    from torch.distributed import fsdp
    from torch.distributed import tensor as dtensor

    functional = torch_internals.functional_collectives()
    owners: dict[str, Any] = {
        "torch": torch,
        "torch.Tensor": torch.Tensor,
        "torch.nn": nn,
        "torch.nn.functional": F,
        "torch.nn.Module": nn.Module,
        "torch.nn.Linear": nn.Linear,
        "torch.nn.Embedding": nn.Embedding,
        "torch.nn.RMSNorm": nn.RMSNorm,
        "torch.optim.Optimizer": torch.optim.Optimizer,
        "torch.optim.AdamW": torch.optim.AdamW,
        "torch.nn.utils": nn.utils,
        "torch.distributed": dist,
        "torch.distributed.distributed_c10d": dist.distributed_c10d,
        functional.__name__: functional,
        "torch.distributed.fsdp": fsdp,
        "torch.distributed.fsdp.FSDPModule": fsdp.FSDPModule,
        "torch.distributed.tensor": dtensor,
        "torch.distributed.tensor.DTensor": dtensor.DTensor,
        "torch.autograd": torch.autograd,
        "torch.utils.checkpoint": torch.utils.checkpoint,
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "plait":
            owners[name] = module
            classes = {f"{name}.{key}": value for key, value in vars(module).items() if isinstance(value, type)}
            owners |= {key: value for key, value in classes.items() if value.__module__ == name}
    found = {}
    for name, owner in owners.items():
        for attribute, value in list(vars(owner).items()):
            if callable(value) or isinstance(value, classmethod | staticmethod | property):
                found[f"{name}.{attribute}"] = value
    return found
