"""Which elements of whole tensors a rank holds, and how one rank's part is filled from those of others."""

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from plait.checkpoint.packed_chunks import runs_of
from plait.parallel.sharding import is_packed

Chunk = list[list[int]]  # where it begins in the whole tensor and in the rank's part, and its lengths: of each dim
Taken = tuple[int, str, tuple[slice, ...], tuple[slice, ...]]  # from which rank's part, of what, from where, to where


def chunks_of(tensor: Tensor) -> list[Chunk]:
    if is_packed(tensor):
        products = runs_of(tensor)
        return [[list(each) for each in zip(*runs, strict=True)] for runs in products]
    if not isinstance(tensor, DTensor):
        return [[[0] * tensor.dim(), [0] * tensor.dim(), list(tensor.shape)]]
    (chunk,) = tensor.__create_chunk_list__()
    return [[list(chunk.offsets), [0] * tensor.dim(), list(chunk.sizes)]]


def taken(key: str, wanted: Sequence[Chunk], held: Mapping[int, Sequence[Chunk]]) -> list[Taken] | None:
    """What fills a rank's part of the tensor `key`; None if the parts that are held do not.

    held: rank -> the chunks of its part. Of ranks with the same chunk the first counts.
    """
    distinct: dict[tuple[int, ...], tuple[int, Chunk]] = {}
    for rank, chunks in held.items():
        for chunk in chunks:
            if math.prod(chunk[2]):
                distinct.setdefault(tuple(chunk[0]), (rank, chunk))
    result, missing = list[Taken](), sum(math.prod(chunk[2]) for chunk in wanted)
    for mine in wanted:
        for rank, theirs in distinct.values():
            both = list(_overlap(mine, theirs))
            if all(length > 0 for _, _, length in both):
                missing -= math.prod(length for _, _, length in both)
                source = tuple(slice(at, at + length) for _, at, length in both)
                result.append((rank, key, source, tuple(slice(at, at + length) for at, _, length in both)))
    return None if missing else result


def _overlap(mine: Chunk, theirs: Chunk) -> Iterator[tuple[int, int, int]]:
    """(where it begins in this rank's part and in the other's, length), of each dim."""
    for first, at, n, other, its, m in zip(*mine, *theirs, strict=True):
        begin = max(first, other)
        yield at + begin - first, its + begin - other, min(first + n, other + m) - begin
