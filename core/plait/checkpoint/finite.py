"""Refuses to save what is not finite, and says from where a run that is no longer finite can continue."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from plait.checkpoint.store import Store
from plait.parallel.state import may_be_infinite


class Extremes:
    """The smallest and the largest value of every parameter and of the optimizer's state, in this rank's shards.

    One kernel per tensor reads it once and leaves two values on its device; nothing is copied. `first_bad` waits for
    them.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._found: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
        for key, tensor in state.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            floats = local.is_floating_point() and local.dtype.itemsize > 1  # torch has no such kernels for 8 bits
            if floats and local.numel() and not may_be_infinite(tensor):
                both = torch.stack(torch.aminmax(local))  # NaN is both
                self._found.setdefault((local.device, local.dtype), []).append((key, both))

    def first_bad(self) -> str | None:
        """The first tensor that holds NaN or infinity, in words."""
        for pairs in self._found.values():
            values = torch.stack([both for _, both in pairs]).cpu()
            if not values.isfinite().all():
                row = int((~values.isfinite()).any(1).nonzero()[0])
                return f"{pairs[row][0]!r} holds {'nan' if values[row].isnan().any() else 'inf'}"
        return None


def where_to_go_on(store: Store, resumed: Path | None = None, saved: int | None = None) -> str:
    """What a run that is no longer finite can continue from, in words.

    resumed: the checkpoint that it continued from. saved: the last step that it saved since. If it has saved none, the
    same command would only diverge again.
    """
    complete = store.complete()
    if resumed is None or saved is not None:
        last = complete[-1:] if saved is None else [store.path_of(saved)]
        return f"the last good checkpoint is kept: {last[0].name}" if last else "no checkpoint was saved yet"
    again = f"it resumed from {resumed.name} and saved nothing since, so it would end here again: "
    if resumed.parent != store.folder:
        return f"{again}let checkpoint.load name an earlier one than {resumed}, or lower optimizer.lr"
    earlier = complete[: complete.index(resumed)] if resumed in complete else complete
    if not earlier:
        return f"{again}no earlier one is left, so lower optimizer.lr, or start again with another run.name"
    return f"{again}remove {resumed} to continue from {earlier[-1].name}, or lower optimizer.lr"
