"""Lets `fully_shard` take the same time in every world: for each parameter torch handles all ranks, on each rank."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from plait import own_chunk
from plait_fsdp2.torch_internals import joined_once


class OwnChunk(TorchFunctionMode):
    """Inside, `torch.chunk` into `ranks` parts makes the first, to whose size torch pads the others, and that of
    `rank`; None stands for each other.

    `fully_shard` looks at no other. Should it in a later torch, it fails on None: nothing can be trained wrong.
    """

    def __init__(self, ranks: int, rank: int) -> None:
        super().__init__()
        self.ranks, self.rank = ranks, rank

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.chunk and len(args) == 2 and args[1] == self.ranks:
            chunks: list[Tensor | None] = [None] * self.ranks
            for rank in (0, self.rank):
                chunks[rank] = own_chunk(args[0], self.ranks, rank, **(kwargs or {}))
            return chunks
        return func(*args, **(kwargs or {}))


@contextmanager
def shared_meshes() -> Iterator[None]:
    """Inside, the same meshes are joined once, and a mesh is sliced once: torch does so for each parameter, and each
    mesh lists all ranks (0.7 MB at 16,384 ranks)."""
    with joined_once(), mock.patch.object(DeviceMesh, "__getitem__", functools.cache(DeviceMesh.__getitem__)):
        yield
