"""Reading checkpoints: into tensors as they lie, whatever layout wrote them."""

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
    """Fill the tensors of `state` in place from the checkpoint at `path`, then call `after`. All ranks together.

    Each rank reads what its own shards need, of what `state` asks for; dtypes are cast. Nothing in the folder is run,
    whoever wrote it. `Store.verify` tells beforehand whether the files are sound.
    Raises PlaitError, with `state` untouched, where the checkpoint lacks an entry or has it in another shape, or
    keeps other things of a parameter than this run's optimizer does.
    """
    reader = Reader(path)
    check_optimizer_state(path, reader.shapes, state)
    fill(reader, state)
    if after:
        after()


def fill(reader: Reader, state: Mapping[str, Tensor]) -> None:
    """Fill the tensors of `state` in place from what `reader` reads. All ranks together. Raises as `load` does."""
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
    """Raises PlaitError if the entries `saved` keep other things of a parameter than `state`, the entries of this run.

    What another optimizer keeps would be lost, or be missing, without a word.
    """
    theirs, ours = _by_parameter(saved), _by_parameter(state)
    for name, keys in ours.items():
        if theirs.get(name, keys) != keys:
            raise PlaitError(
                f"the checkpoint {path} is of another optimizer: of {name!r} it keeps "
                f"{', '.join(sorted(theirs[name]))}, and this run's keeps {', '.join(sorted(keys))}"
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
