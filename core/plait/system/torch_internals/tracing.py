"""What sees the operators of a program run: modes, tensors without values, trees of arguments, autograd's nodes.

Needs `torch._subclasses.fake_tensor`, `torch.utils._python_dispatch`, `torch.utils._pytree`, `_schema` of operators,
`torch._C._current_autograd_node` and `torch._C._autograd._get_sequence_nr`, in torch 2.11 to 2.13. Tests:
tests/system/test_torch_internals.py. They are called for every operator of a traced step, so names are passed on here
where a function of our own would say no more.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "is_traceable_wrapper_subclass_type",
    "next_node",
    "node_number",
    "schema",
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
