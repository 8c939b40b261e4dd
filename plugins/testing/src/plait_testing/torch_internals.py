"""What the suites see of torch: operators, hooks, groups and caches that a run may leave behind.

Needs `torch.utils._python_dispatch`, `torch.utils._pytree`, `_schema` of operators, `UntypedStorage._cdata`,
`_world.pg_map` (all process groups), `torch.distributed._functional_collectives`, the tables of hooks of modules,
tensors and optimizers, `_len_torch_function_stack`, `reset` of `torch._dynamo`, and handles of FSDP1's flat parameters,
in torch 2.11 to 2.15. Tests: plugins/testing/tests/test_torch_internals.py and test_foreign.py.
"""

import importlib
import sys
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "COMPILER",
    "PRELOADED",
    "TorchDispatchMode",
    "all_groups",
    "flat_gradients",
    "forget_compiled",
    "functional_collectives",
    "global_hooks",
    "hooks_of",
    "hooks_of_optimizer",
    "hooks_of_tensor",
    "modes",
    "schema",
    "storage_key",
    "tree_leaves",
]

COMPILER = "torch._dynamo"  # a module that takes seconds to import
PRELOADED = (  # of a process whose forks are ranks, which so start at once and in a fresh state; none starts threads
    *("torch", COMPILER, "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch.distributed.tensor.parallel", "torch._inductor.compile_fx", "torch._dynamo.backends.debugging"),
)
OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def schema(operator: Any) -> Any:
    """The name, arguments and results of an OpOverload."""
    return operator._schema


def storage_key(storage: Any) -> int:
    """Tells an UntypedStorage apart from others that exist at the same time."""
    return storage._cdata


def modes() -> dict[str, int]:
    """How many modes are active, by their kind."""
    from torch.overrides import _len_torch_function_stack
    from torch.utils._python_dispatch import _len_torch_dispatch_stack

    return {"function": _len_torch_function_stack(), "dispatch": _len_torch_dispatch_stack()}


def hooks_of(module: Any) -> tuple[int, ...]:
    """How many hooks of each kind a module has."""
    return tuple(len(getattr(module, kind)) for kind in OF_MODULES)


def hooks_of_tensor(tensor: Any) -> int:
    """How many hooks on its gradient a tensor has."""
    return sum(len(getattr(tensor, kind) or ()) for kind in OF_TENSORS)


def hooks_of_optimizer(optimizer: Any) -> int:
    return sum(len(getattr(optimizer, kind)) for kind in OF_OPTIMIZERS)


def global_hooks() -> dict[str, int]:
    """How many hooks on all modules there are, by the names of torch's tables."""
    from torch.nn.modules import module

    tables = {name: value for name, value in vars(module).items() if name.startswith("_global_")}
    return {name: len(value) for name, value in tables.items() if hasattr(value, "__len__")}


def all_groups() -> list[Any]:
    """Every process group that this process is in."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_map)


def functional_collectives() -> Any:
    """The module of the collectives that return a new tensor."""
    return importlib.import_module("torch.distributed._functional_collectives")


def forget_compiled() -> None:
    """Forget all compiled code, if there can be any."""
    if COMPILER in sys.modules:
        sys.modules[COMPILER].reset()


def flat_gradients(model: Any) -> dict[str, Any] | None:
    """FQN -> the whole gradient of each parameter that FSDP1 keeps in flat ones, or that none keeps. None: it keeps the
    original parameters, whose gradients `summon_full_params(with_grads=True)` gathers. Collective."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
            continue
        if module._handle._use_orig_params:
            return None
        flat, group = module._handle.flat_param, module.process_group
        shard = torch.zeros_like(flat._local_shard) if flat.grad is None else flat.grad
        whole = shard.new_empty(shard.numel() * dist.get_world_size(group))
        dist.all_gather_into_tensor(whole, shard.contiguous(), group=group)
        sizes, padding = flat._numels_with_padding, flat._is_padding_mask
        pieces = whole[: sum(sizes)].split(list(sizes))
        kept = [piece for piece, padded in zip(pieces, padding, strict=True) if not padded]
        for fqn, shape, piece in zip(flat._fqns, flat._shapes, kept, strict=True):
            found[f"{prefix}.{fqn}" if prefix else fqn] = piece.view(shape)
    flats = [(name, p) for name, p in model.named_parameters() if "_flat_param" not in name and p.grad is not None]
    return found | {name: p.grad for name, p in flats}
