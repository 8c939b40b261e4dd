"""Fills a tensor, or this rank's part of a DTensor, from a tensor of a safetensors file."""

from typing import TYPE_CHECKING, Any

from plait.contract.weight_part import WeightPart

if TYPE_CHECKING:  # the parent checks names and shapes without torch
    from torch import Tensor


def fill(tensor: "Tensor", source: Any, name: str, part: WeightPart) -> None:
    """What `tensor` holds of the part on this rank."""
    import torch
    from torch.distributed.tensor import DTensor

    from plait.parallel.initialize import held_indices

    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if tensor.dim() == 0:
            local.copy_(source.get_tensor(name))
            return
        here, there = [], []  # per dim of the parameter: places in `local`, and in the part
        for dim, (start, size) in enumerate(zip(part.start, part.size, strict=True)):
            held = held_indices(tensor, dim) - start
            inside = (held >= 0) & (held < size)
            here.append(inside.nonzero().flatten())
            there.append(held[inside])
        if any(not len(places) for places in here):
            return
        read = source.get_slice(name)[tuple(_span(there[dim]) for dim in part.dims)]
        piece = part.as_in_parameter(read)
        for dim, places in enumerate(there):
            if len(places) != piece.shape[dim]:
                piece = piece.index_select(dim, places - places.min())
        if all(_span(places).stop - _span(places).start == len(places) for places in here):
            local[tuple(map(_span, here))] = piece.to(local.device, local.dtype)
        else:
            local[torch.meshgrid(*here, indexing="ij")] = piece.to(local.device, local.dtype)


def _span(places: "Tensor") -> slice:
    """From the first of the places, which ascend, to the last."""
    return slice(int(places[0]), int(places[-1]) + 1)
