"""Materialises a model that was built on meta and fills it: a function of (seed, FQN, global index) alone."""

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plait.contract.errors import PlaitError
from plait.contract.exact import parameters_of
from plait.contract.model_spec import ModelSpec
from plait.system.torch_internals.dtensors import split_of

Runs = tuple[tuple[int, int], ...]
MANY = 100_000  # values that are worth another thread's turn


def materialise(model: nn.Module, device: str | torch.device, storage: str | torch.device | None = None) -> None:
    """Allocate parameters on `storage`, by default `device`, and buffers on `device`, where the model computes.

    Tied parameters stay tied, and hooks and the attributes of parameters stay where they are.
    torch's own `to_empty` creates a new parameter for every use of a plain tied one; swapping keeps the object.
    """
    kept = [(param, dict(vars(param))) for param in model.parameters()]
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=storage or device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    for param, attributes in kept:
        vars(param).update(attributes)  # swapping takes them away
    if storage is not None and torch.device(storage) != torch.device(device):
        _move_buffers(model, device)


def _move_buffers(model: nn.Module, device: str | torch.device) -> None:
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, torch.empty_like(buffer, device=device))


@torch.no_grad()
def initialise(model: nn.Module, spec: ModelSpec, seed: int) -> int:
    """Fill every parameter and buffer of `model` by the spec; returns how many values this rank drew.

    Bitwise the same in every layout and world size: a parameter of two or more dims is drawn row by row of dim 0,
    each row by its own generator, in float32, then cast; a rank draws only rows of which it holds a part, with as many
    threads as torch uses.
    """
    drawn = 0
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for fqn, param in model.named_parameters():
            drawn += fill(param, fqn, spec.init_of(fqn), seed, pool)
    for fqn, buffer in model.named_buffers():
        value = torch.empty(buffer.shape, dtype=buffer.dtype)  # on the CPU, as its generator is
        spec.init_of(fqn)(value, torch.Generator().manual_seed(_keys(seed, fqn)[0]))
        buffer.copy_(value)
    return drawn


def fill(param: Tensor, fqn: str, fn: Callable[..., Any], seed: int, pool: ThreadPoolExecutor) -> int:
    """Fill one parameter as `initialise` does; returns how many values this rank drew."""
    local = param.to_local() if isinstance(param, DTensor) else param
    if local.numel() == 0:
        return 0
    start, step = _keys(seed, fqn)
    held = [held_indices(param, dim) for dim in range(param.dim())]
    inner = tuple(slice(None) if len(h) == size else h for h, size in zip(held[1:], param.shape[1:], strict=True))
    straight = param.dim() > 1 and not any(isinstance(indices, Tensor) for indices in inner)  # rows as they are drawn
    rows = held[0].tolist() if param.dim() > 1 else [0]
    filled = torch.empty(local.shape, dtype=torch.float32)
    shape = param.shape[1:] if param.dim() > 1 else param.shape
    told = param.dim() > 1 and "row" in list(parameters_of(fn) or ())[2:]  # after the tensor and the generator

    @torch.no_grad()  # which is a thread's own
    def draw(some: range) -> None:
        own, generator = torch.empty(shape, dtype=torch.float32), torch.Generator()
        for i in some:
            more = {"row": rows[i]} if told else {}
            row = filled[i] if straight else own
            # torch's CPU generator uses 32 bits of a seed: an odd step keeps the rows of a parameter distinct
            fn(row, generator.manual_seed((start + rows[i] * step) % 2**32), **more)
            if param.dim() < 2:
                filled.copy_(row[held[0]] if param.dim() == 1 else row)
            elif not straight:
                filled[i] = _take(row, inner)

    each = max(len(rows) // 64, MANY // max(math.prod(shape), 1), 1)
    list(pool.map(draw, [range(i, min(i + each, len(rows))) for i in range(0, len(rows), each)]))
    local.copy_(filled)
    return len(rows) * math.prod(shape)


def _take(row: Tensor, inner: tuple[slice | Tensor, ...]) -> Tensor:
    for dim, indices in enumerate(inner):
        if isinstance(indices, Tensor):
            row = row.index_select(dim, indices)
    return row


def own_chunk(tensor: Tensor, ranks: int, rank: int, dim: int = 0) -> Tensor:
    """The part, as a view, that `rank` gets if `torch.chunk` divides `tensor` over `ranks` along `dim`.

    Parts have the same length, but the last ones may be shorter or empty. torch itself makes the parts of all ranks, so
    a rank of a large world would spend most of its set-up on those of the others.
    """
    size = tensor.shape[dim]
    length = -(-size // ranks)
    start = min(length * rank, size)
    return tensor.narrow(dim, start, min(length, size - start))


def held_indices(param: Tensor, dim: int) -> Tensor:
    """The global indices along `dim` that this rank holds. It computes no other's: torch would make those of all ranks.

    A strided shard (FSDP over tensor parallelism, or a share of each part of a packed dim) is a part of each of
    `split_factor` pieces. Raises PlaitError for a packed dim that another strategy divides too.
    """
    return torch.cat([torch.arange(*run) for run in held_runs(param, dim)] or [torch.arange(0)])


def held_runs(param: Tensor, dim: int, at: Sequence[int] | None = None) -> Runs:
    """The same as runs of consecutive indices, (start, end) each. at: the coordinates of another rank on the mesh that
    `param` lives on; None: of this one."""
    runs: Runs = ((0, param.shape[dim]),)
    for axis, placement in enumerate(param.placements if isinstance(param, DTensor) else ()):
        divided, pieces = split_of(placement)
        if divided == dim:
            mesh, size = param.device_mesh, sum(end - start for start, end in runs)  # type: ignore[attr-defined]
            if pieces > 1 and size < param.shape[dim]:
                raise PlaitError(
                    f"dim {dim} of a parameter of shape {tuple(param.shape)} holds {pieces} parts, of which ranks have "
                    "shares, and another strategy divides it too; it must divide the dim that plait.shard_dim says"
                )
            rank = mesh.get_local_rank(axis) if at is None else at[axis]
            each = [_chunk(runs, pieces, i) for i in range(pieces)]
            runs = tuple(run for piece in each for run in _chunk(piece, mesh.size(axis), rank))
    return runs


def _chunk(runs: Runs, ranks: int, rank: int) -> Runs:
    """`own_chunk` of the indices in `runs`."""
    length = -(-sum(end - start for start, end in runs) // ranks)
    kept, before = [], 0
    for start, end in runs:
        first, last = start + max(length * rank - before, 0), start + min(length * (rank + 1) - before, end - start)
        kept += [(first, last)] if first < last else []
        before += end - start
    return tuple(kept)


def _keys(seed: int, fqn: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}/{fqn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big") | 1
