"""Reads checkpoints into tensors with any placement, whatever layout wrote them."""

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from plait.checkpoint.frozen_parameters import is_frozen
from plait.checkpoint.packed_chunks import in_chunks
from plait.checkpoint.pieces import Damaged
from plait.checkpoint.reader import Reader
from plait.checkpoint.store import Store
from plait.contract.errors import PlaitError, near_miss
from plait.parallel.agreement import on_all_ranks, on_rank_0
from plait.parallel.replica import replica_of, shared_name
from plait.parallel.state import is_absent, is_canonical, mark


def load_latest(
    store: Store,
    state: Mapping[str, Tensor],
    after: Callable[[], Any] | None = None,
    newest: Callable[[], Path | None] | None = None,
    elsewhere: Callable[[], bool] = lambda: False,
) -> Path | None:
    """Load the newest sound checkpoint of `store` as `load` does; returns its path, None if there are none.

    Called by all ranks. Damage that any rank finds is entered in `store.damaged` on all; then all load the one before.
    newest: called on rank 0 for the first one and after each damaged one; None: `store.latest`. elsewhere: called on
    all ranks before that; returns whether it has filled `state`, and nothing is to be read. Raises PlaitError, naming
    each, if there are some and none is sound, and as `load` does.
    """
    while not elsewhere() and (path := on_rank_0(newest or store.latest)):
        try:
            load(path, state, after)
        except Damaged as error:
            store.damaged[path] = error.why or str(error)
        else:
            return path
    return None


def load(path: str | os.PathLike[str], state: Mapping[str, Tensor], after: Callable[[], Any] | None = None) -> None:
    """Fill the tensors of `state` in place from the checkpoint at `path`, then call `after`. Called by all ranks.

    Each rank reads what its own shards need and compares its digests; of replicas one reads for all. Dtypes are cast.
    No code in the folder is run, whoever wrote it.
    Raises PlaitError, with `state` untouched, if the checkpoint lacks an entry of the model or its optimizer (other
    than a frozen parameter's), has one in another shape, or keeps other optimizer state for a parameter than this run's
    optimizer, or is of another number of replicas than their strategy lets load it. Raises Damaged
    if what any rank reads is not as it was written; then `state` may hold some of it, all absent state is still absent,
    and `after` is not called. Either is raised on all ranks.
    """
    opened: list[tuple[Reader, dict[str, Tensor]]] = []

    def match() -> None:
        reader = Reader(path)
        replica = next(filter(None, map(replica_of, state.values())), None)
        Store.check_replicas(reader.manifest, replica.ranks if replica else {})
        check_optimizer_state(path, reader.shapes, state)
        opened.append((reader, _wanted(reader, state)))

    on_all_ranks(match, dist.group.WORLD if dist.is_initialized() else None)
    _read(*opened[0])
    if after:
        after()


def fill(reader: Reader, state: Mapping[str, Tensor]) -> None:
    """Fill the tensors of `state` in place from what `reader` reads. Called by all ranks. Raises as `load` does."""
    _read(reader, _wanted(reader, state))


def _wanted(reader: Reader, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of `state` that the checkpoint has."""
    path, saved, wanted = reader.path, reader.shapes, {}
    for key, tensor in state.items():
        replica = replica_of(tensor)
        if replica and replica.axes and (own := replica.own_name(key)) in saved:
            key = own  # as many replicas as were saved: each goes on from its own
        if key in saved:
            if saved[key] != tuple(tensor.shape):
                why = "; are all options of the optimizer those of the run that saved it?" if _of_optimizer(key) else ""
                raise PlaitError(
                    f"the checkpoint {path} has {key!r} in shape {saved[key]}, and this run needs "
                    f"{tuple(tensor.shape)}{why}"
                )
            wanted[key] = tensor
        elif is_canonical(key) and not (is_absent(tensor) or is_frozen(tensor)):
            raise PlaitError(f"the checkpoint {path} has no {key!r}{near_miss(key, list(saved))}; {_summary(saved)}")
    return wanted


def _read(reader: Reader, wanted: dict[str, Tensor]) -> None:
    """Fill `wanted`; of replicas the first reads, and the others get what it has read."""
    mine = {key: t for key, t in wanted.items() if all(dist.get_rank(group) == 0 for group in _replicas(t))}
    try:
        alone = not dist.is_initialized()
        with warnings.catch_warnings(action="ignore") if alone else nullcontext():  # "no process group"
            dcp.load(in_chunks(mine), storage_reader=reader, no_dist=alone)
    except dcp.CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, Damaged):
                raise cause from None
        rank, (cause, _) = next(iter(error.failures.items()))
        raise PlaitError(f"the checkpoint {reader.path} cannot be read: {cause} (rank {rank})") from error
    for tensor in wanted.values():
        for group in _replicas(tensor):
            local = cast(DTensor, tensor).to_local()
            data = local.contiguous()
            dist.broadcast(data.reshape(-1).view(torch.uint8), dist.get_global_rank(group, 0), group)
            if data is not local:
                local.copy_(data)
        mark(tensor, False)


def _replicas(tensor: Tensor) -> list[dist.ProcessGroup]:
    """The groups of ranks, one per axis of its mesh, that hold the same part of `tensor` as this rank."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [
        mesh.get_group(axis) for axis, p in enumerate(tensor.placements) if p.is_replicate() and mesh.size(axis) > 1
    ]


def check_optimizer_state(path: str | os.PathLike[str], saved: Iterable[str], state: Iterable[str]) -> None:
    """Raises PlaitError if `saved` has other optimizer state for a parameter than `state`, the entries of this run.

    Another optimizer's state would be lost, or be missing, silently.
    """
    theirs, ours = _by_parameter(saved), _by_parameter(state)
    for name, keys in ours.items():
        if theirs.get(name, keys) != keys:
            raise PlaitError(
                f"the checkpoint {path} is of another optimizer, or of one with other options: for {name!r} it has "
                f"{', '.join(sorted(theirs[name]))}, but this run's optimizer has {', '.join(sorted(keys))}"
            )


def _of_optimizer(key: str) -> bool:
    return key.startswith("optimizer.")


def _by_parameter(keys: Iterable[str]) -> dict[str, set[str]]:
    entries: dict[str, set[str]] = defaultdict(set)
    for key in map(shared_name, keys):
        if _of_optimizer(key):
            name, _, what = key.removeprefix("optimizer.").rpartition(".")
            entries[name].add(what)
    return entries


def _summary(saved: Iterable[str]) -> str:
    keys = list(saved)
    return f"it has {len(keys)} entries, from {keys[0]!r} to {keys[-1]!r}" if keys else "it is empty"
