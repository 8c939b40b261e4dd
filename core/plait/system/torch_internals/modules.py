"""Hooks, and the children of a module under each of their names.

Needs the tables `_modules`, `_forward_pre_hooks`, `_forward_hooks`, `_backward_pre_hooks`, `_backward_hooks` of
modules, `_backward_hooks` and `_post_accumulate_grad_hooks` of tensors, `_optimizer_step_pre_hooks` and
`_optimizer_step_post_hooks` of optimizers, in torch 2.11 to 2.15. Tests:
tests/system/test_torch_internals.py. No torch is imported here.
"""

from collections import OrderedDict
from typing import Any

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def hooks_of(module: Any) -> dict[str, dict[int, Any]]:
    """Kind -> the table of the hooks of `module`, such as "forward pre hooks"."""
    return {kind.replace("_", " ").strip(): getattr(module, kind) for kind in HOOKS}


def hooks_of_tensor(tensor: Any) -> int:
    """How many hooks on its gradient a tensor has."""
    return sum(len(getattr(tensor, kind) or ()) for kind in _OF_TENSORS)


def without_hooks(optimizer: Any) -> None:
    """Give `optimizer` empty tables of hooks, in place; a table that it shared keeps its hooks."""
    for kind in _OF_OPTIMIZERS:
        setattr(optimizer, kind, OrderedDict())


def children_of(module: Any) -> dict[str, Any]:
    """The table of children: None too, and one that has several names under each of them."""
    return module._modules
