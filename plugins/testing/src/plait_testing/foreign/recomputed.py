"""Switches recomputation on in a model of any framework."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

from plait import PlaitError


def recompute(model: nn.Module) -> None:
    """By transformers' own switch, else around each module in a ModuleList, inside of what wraps it.
    Raises PlaitError if there is neither."""
    for module in model.modules():
        if callable(switch := getattr(module, "gradient_checkpointing_enable", None)):
            return switch(gradient_checkpointing_kwargs={"use_reentrant": False})
    blocks = [block for each in model.modules() if isinstance(each, nn.ModuleList) for block in each]
    if not blocks:
        raise PlaitError("the model has no ModuleList to recompute: give recompute=, or switch off recomputation")
    for block in blocks:
        inner: Any = block.module if isinstance(block, FullyShardedDataParallel) else block
        inner.forward = _recomputed(inner.forward)
    return None


def _recomputed(forward: Any) -> Any:
    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return again
