"""What sees the operators of a program run, without their values: modes, fake tensors, storages, nodes of autograd.

Needs `torch._subclasses.fake_tensor`, `torch.utils._python_dispatch`, `torch.utils._pytree`, `_schema` of operators,
`torch._C._current_autograd_node`, `torch._C._dispatch_key_set`, `torch._C._autograd._get_sequence_nr`,
`UntypedStorage._cdata`, `Tensor._make_subclass`, `DTensor._local_tensor`,
`ShardingPropagator._propagate_tensor_meta_non_cached` or `_propagate_tensor_meta`,
`distributed_c10d._resolve_process_group`, `torch._dynamo`, and `stage_backward_input` and `stage_backward_weight` of
`torch.distributed.pipelining._backward`, in torch 2.11 to 2.15. Tests: plugins/plan/tests/test_torch_internals.py. They
are called for every operator of a traced step, so names are passed on here where a function of our own would say no
more.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FakeTensors",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "dispatch_keys",
    "gradient_of_input",
    "gradients_of_weights",
    "is_of_torch",
    "is_traceable_wrapper_subclass_type",
    "local_part",
    "next_node",
    "node_number",
    "ranks_of",
    "schema",
    "shape_learners",
    "storage_key",
    "tree_leaves",
    "tree_map_only",
]

next_node = torch._C._autograd._get_sequence_nr  # the number that the next node of autograd will have


def node_number() -> int | None:
    """The number of the node of autograd whose backward runs now; None if none runs, or one without a number: of a
    gradient that is added to its parameter."""
    node = torch._C._current_autograd_node()
    number = None if node is None else node._sequence_nr()
    return number if number is not None and number < 2**63 else None


def schema(operator: Any) -> Any:
    """The name, arguments and results of an OpOverload."""
    return operator._schema


def is_of_torch(operator: Any) -> bool:
    """Whether it is an OpOverload of torch itself, and no other package's or that of a collective."""
    return isinstance(operator, OpOverload) and operator.namespace in ("aten", "prim", "prims")


def dispatch_keys(tensor: Any) -> Any:
    """Decide which kernels see the tensor; equal for tensors that are alike in this."""
    return torch._C._dispatch_key_set(tensor)


class FakeTensors:
    """Makes what `FakeTensor(mode, plain, device)` makes, in a third of the time: but for its sizes, a fake tensor
    knows no more than its mode and its device."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, dict[str, Any]] = {}  # device -> the attributes of its tensors

    def of(self, plain: Tensor, device: Any) -> Tensor:
        """plain: on meta."""
        if (known := self._known.get(device)) is None:
            first = FakeTensor(self._mode, plain, device)
            self._known[device] = dict(vars(first))
            return first
        made: Tensor = Tensor._make_subclass(
            FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device
        )
        vars(made).update(known)
        return made


def storage_key(storage: Any) -> int:
    """Tells an UntypedStorage apart from others that exist at the same time."""
    return storage._cdata


def local_part(tensor: Any) -> Tensor:
    """The part of a DTensor on this rank, past autograd; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def shape_learners() -> list[tuple[Any, str]]:
    """(class, name of its method) of what calls an operator only to learn the shape of its result."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    names = ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta")
    return [(ShardingPropagator, name) for name in names if hasattr(ShardingPropagator, name)]


def ranks_of(name: str) -> tuple[int, ...]:
    """The world ranks of the process group of this name."""
    from torch.distributed import distributed_c10d

    known: Any = name  # torch's stubs have a type of their own for it
    return tuple(distributed_c10d.get_process_group_ranks(distributed_c10d._resolve_process_group(known)))


def gradient_of_input(
    result: Tensor, gradients: list[Tensor] | None, stream: Tensor, weights: Iterator[nn.Parameter]
) -> tuple[Any, Any]:
    """The gradient of `stream`, as torch's schedules compute it before those of weights, and what
    `gradients_of_weights` needs to go on."""
    from torch.distributed.pipelining._backward import stage_backward_input

    made, left = stage_backward_input([result], gradients, [stream], weights)
    return made[0], left


def gradients_of_weights(weights: Iterator[nn.Parameter], left: Any) -> None:
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(weights, left)


def import_compiler() -> None:
    """Import the part of torch's compiler that the first step of any model imports, which takes two seconds."""
    import_module("torch._dynamo")
