"""Reads checkpoints into tensors with any placement, whatever layout wrote them."""

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from plait.checkpoint.reader import Reader
from plait.contract.errors import PlaitError, near_miss
from plait.parallel.state import is_absent, mark


def load(path: str | os.PathLike[str], state: Mapping[str, Tensor], after: Callable[[], Any] | None = None) -> None:
    """Fill the tensors of `state` in place from the checkpoint at `path`, then call `after`. Called by all ranks.

    Each rank reads what its own shards need; dtypes are cast. No code in the folder is run, whoever wrote it.
    `Store.verify` checks beforehand whether the files are sound. Raises PlaitError, with `state` untouched, if the
    checkpoint lacks an entry or has it in another shape, or if it keeps other optimizer state for a parameter than this
    run's optimizer.
    """
    reader = Reader(path)
    check_optimizer_state(path, reader.shapes, state)
    fill(reader, state)
    if after:
        after()


def fill(reader: Reader, state: Mapping[str, Tensor]) -> None:
    """Fill the tensors of `state` in place from what `reader` reads. Called by all ranks. Raises as `load` does."""
    path, saved, wanted = reader.path, reader.shapes, {}
    for key, tensor in state.items():
        if key in saved:
            if saved[key] != tuple(tensor.shape):
                raise PlaitError(
                    f"the checkpoint {path} has {key!r} in shape {saved[key]}, and this run needs {tuple(tensor.shape)}"
                )
            wanted[key] = tensor
        elif not is_absent(tensor):
            raise PlaitError(f"the checkpoint {path} has no {key!r}{near_miss(key, list(saved))}; {_summary(saved)}")
    try:
        alone = not dist.is_initialized()
        with warnings.catch_warnings(action="ignore") if alone else nullcontext():  # "no process group"
            dcp.load(dict(wanted), storage_reader=reader, no_dist=alone)
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise PlaitError(f"the checkpoint {path} cannot be read: {cause} (rank {rank})") from error
    for tensor in wanted.values():
        mark(tensor, False)


def check_optimizer_state(path: str | os.PathLike[str], saved: Iterable[str], state: Iterable[str]) -> None:
    """Raises PlaitError if `saved` has other optimizer state for a parameter than `state`, the entries of this run.

    Another optimizer's state would be lost, or be missing, silently.
    """
    theirs, ours = _by_parameter(saved), _by_parameter(state)
    for name, keys in ours.items():
        if theirs.get(name, keys) != keys:
            raise PlaitError(
                f"the checkpoint {path} is of another optimizer: for {name!r} it has "
                f"{', '.join(sorted(theirs[name]))}, but this run's optimizer has {', '.join(sorted(keys))}"
            )


def _by_parameter(keys: Iterable[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for key in keys:
        if key.startswith("optimizer."):
            name, _, what = key.removeprefix("optimizer.").rpartition(".")
            found[name].add(what)
    return found


def _summary(saved: Iterable[str]) -> str:
    keys = list(saved)
    return f"it has {len(keys)} entries, from {keys[0]!r} to {keys[-1]!r}" if keys else "it is empty"
