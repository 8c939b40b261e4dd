"""Looks up tokens in a part of the vocabulary."""

from typing import Any

from torch import Tensor, nn

from plait import PlaitError, mix_in


def look_up_in_part(module: nn.Module, rows: int, axis: Any) -> None:
    """Make `module`, which has this rank's part of its `rows` rows, return 0 for tokens of other ranks' parts.

    Only if it is called with integers; called with floats, it multiplies as before.
    """
    if getattr(module, "max_norm", None) is not None or getattr(module, "scale_grad_by_freq", False):
        raise PlaitError(f"{type(module).__name__} with max_norm or scale_grad_by_freq cannot be divided over ranks")
    part: Any = module
    mix_in(module, Lookup)
    part._rows = rows // axis.size()
    part._first = axis.get_local_rank() * part._rows
    padding = getattr(module, "padding_idx", None)
    if padding is not None:
        part.padding_idx = padding - part._first if 0 <= padding - part._first < part._rows else None


class Lookup:
    """Mixed into the class of a module, which then sees ids within this rank's part."""

    _first: int
    _rows: int

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plain: Any = super()
        if ids.is_floating_point():
            return plain.forward(ids, *args, **kwargs)
        own = ids - self._first
        elsewhere = (own < 0) | (own >= self._rows)
        return plain.forward(own.masked_fill(elsewhere, 0), *args, **kwargs).masked_fill(elsewhere[..., None], 0)
