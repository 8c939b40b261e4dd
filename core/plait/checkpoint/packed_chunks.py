"""Shares of packed dims in checkpoints: several chunks of a tensor on one rank, where torch expects one.

A checkpoint holds the whole tensor in its own order, as from any other layout.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from plait.parallel.initialize import held_indices
from plait.parallel.sharding import is_packed


def in_chunks(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state`, of which packed tensors tell torch's planners which chunks this rank holds. They alias the originals."""
    return {key: _in_chunks(tensor.detach()) if is_packed(tensor) else tensor for key, tensor in state.items()}


def _in_chunks(tensor: Any) -> Any:
    local, parts = tensor.to_local(), dict[torch.Size, Tensor]()
    for runs in runs_of(tensor):
        place = torch.Size(start for start, _, _ in runs)
        parts[place] = local[tuple(slice(at, at + length) for _, at, length in runs)]
    chunks = [ChunkStorageMetadata(place, part.shape) for place, part in parts.items()]
    properties = TensorProperties.create_from_tensor(local)
    # what torch asks each tensor of a checkpoint
    tensor.__create_chunk_list__ = lambda: chunks
    tensor.__get_tensor_shard__ = lambda index: parts[index.offset]
    tensor.__create_write_items__ = lambda fqn, _: [
        WriteItem(
            MetadataIndex(fqn, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, tensor.size()),
        )
        for chunk in chunks
    ]
    return tensor


def runs_of(tensor: Tensor) -> list[tuple[tuple[int, int, int], ...]]:
    """(first index, its place in this rank's part, length) of each dim of each of its chunks."""
    return list(itertools.product(*(_runs(held_indices(tensor, dim)) for dim in range(tensor.dim()))))


def _runs(held: Tensor) -> list[tuple[int, int, int]]:
    """(first index, its place among `held`, length) of each run of neighbours."""
    starts = [0, *(torch.nonzero(held.diff() != 1).flatten() + 1).tolist(), len(held)]
    return [(int(held[at]), at, end - at) for at, end in itertools.pairwise(starts) if end > at]
