"""Which operators are collectives, over which mesh axis, and how many bytes they move."""

import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait_plan.torch_internals import schema

KINDS = {
    "reduce_scatter": r"reduce_?scatter",
    "all_gather": r"all_?gather",
    "all_reduce": r"all_?reduce",
    "all_to_all": r"all_?to_?all",
    "broadcast": r"broadcast",
    "send": r"send",
    "recv": r"recv",
}
SPACES = ("c10d", "_c10d_functional", "c10d_functional")


def kind_of(operator: Any) -> str | None:
    """The kind of collective that `operator` (an OpOverload) is; None if it is not one."""
    if operator.namespace not in SPACES:
        return None
    name = schema(operator).name.partition("::")[2]
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), None)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """All tensors among arguments or results of an operator, in order."""
    found: list[Tensor] = []
    for one in values:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            found += tensors_in(one)
    return found


def moved(args: Iterable[Any], result: Any) -> int:
    """Bytes of the input or of the result, whichever is larger; inputs that are written to are results."""
    return max(sum(t.numel() * t.element_size() for t in tensors_in((a,))) for a in (*args, result))


def group_of(args: Iterable[Any]) -> str:
    """The name of the process group among the arguments of a collective; "" if there is none."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return str(dist.ProcessGroup.unbox(arg).group_name)
            except RuntimeError:  # another kind of object, such as the operation
                continue
    names = [arg for arg in args if isinstance(arg, str)]
    return names[-1] if names else ""
