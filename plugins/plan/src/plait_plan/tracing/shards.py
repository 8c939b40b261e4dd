"""Steps of fused optimizers on shards: each rank steps its own parts, whatever DTensor would first ask."""

from typing import Any

from torch.distributed.tensor import DTensor

from plait_plan.torch_internals import local_part, schema


def parts_alone(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The arguments of one of torch's fused optimizers, with its DTensors replaced by their parts on this rank; None if
    it is another operator, or if DTensor would first move something.

    It moves nothing if a parameter, its gradient and its states lie alike. It finds that out from all ways in which
    each tensor of the step could be divided, which takes longer than the rest of the step.
    """
    if not schema(func).name.startswith("aten::_fused_ada"):
        return None
    lists = [given for given in args if isinstance(given, list | tuple)]
    for tensors in zip(*(given for given in lists if any(isinstance(t, DTensor) for t in given)), strict=True):
        first = tensors[0]
        if not all(isinstance(t, DTensor) for t in tensors) or any(p.is_partial() for p in first.placements):
            return None
        if any(
            (t.device_mesh, t.placements, t.shape) != (first.device_mesh, first.placements, first.shape)
            for t in tensors
        ):
            return None
    if any(isinstance(t, DTensor) for t in args) or not all(_scalar(t) for given in lists for t in given):
        return None
    return tuple([local_part(t) for t in given] if isinstance(given, list | tuple) else given for given in args)


def _scalar(tensor: Any) -> bool:
    """Whether it is a DTensor, or one that DTensor takes to be the same on all ranks."""
    return isinstance(tensor, DTensor) or tensor.dim() == 0
