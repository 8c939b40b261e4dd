"""Layouts of two ranks that are compared with one process."""

from collections.abc import Callable
from typing import Any

from plait_testing.models import moe

LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {  # name -> the model, the strategies
    "fsdp2": ("llama3", {"fsdp2": {}}),
    "tensor_parallel": ("llama3", {"tensor_parallel": {"degree": 2}}),
    "pipeline": ("llama3", {"pipeline": {"degree": 2}}),
    "expert_parallel": (moe, {"expert_parallel": {"degree": 2}, "fsdp2": {}}),
    "zero": ("llama3", {"zero": {}}),
    "ddp": ("llama3", {"ddp": {}}),
}


def in_one_process(ranks: Any, function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` returns in one process, computed once for all tests of a pool."""
    key = ("in one process", function.__module__, function.__name__, *map(str, args))
    if key not in ranks.kept:
        (ranks.kept[key],) = ranks.run(function, *args, world=1)
    return ranks.kept[key]


def farthest(one: Any, other: Any) -> float:
    """Of all parameters of two trials, the largest distance between their ends, as a share of the way that each went in
    `one`."""
    return max(
        float((other.final[fqn] - end).norm()) / float((one.initial[fqn] - end).norm())
        for fqn, end in one.final.items()
    )
