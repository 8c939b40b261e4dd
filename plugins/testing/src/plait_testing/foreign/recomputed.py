"""Switches recomputation on in a model of any framework."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint


def recompute(model: nn.Module) -> bool:
    """By transformers' own switch, else around each module in a ModuleList or ModuleDict, inside of what wraps it.
    False if there is neither."""
    for module in model.modules():
        if callable(switch := getattr(module, "gradient_checkpointing_enable", None)):
            switch(gradient_checkpointing_kwargs={"use_reentrant": False})
            return True
    blocks = list(_blocks(model))
    for block in blocks:
        inner: Any = block.module if isinstance(block, FullyShardedDataParallel) else block
        inner.forward = _recomputed(inner.forward)
    return bool(blocks)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for each in model.modules():
        if isinstance(each, nn.ModuleDict):
            yield from each.values()
        elif isinstance(each, nn.ModuleList):
            yield from each


def _recomputed(forward: Any) -> Any:
    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return again
