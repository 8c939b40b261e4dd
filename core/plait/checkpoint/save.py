"""Writing checkpoints: all ranks together, while training waits or goes on."""

import datetime
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from plait.checkpoint.files import clear, digest
from plait.checkpoint.state import is_absent, weights
from plait.checkpoint.store import Manifest, Store
from plait.errors import PlaitError

T = TypeVar("T")


class Saver:
    """Saves into `store` and keeps the last `keep`. Every method is for all ranks, in the same order.

    mode "sync": `save` returns when the checkpoint is complete. "async": it returns with a copy of the state in this
    machine's memory, which a thread writes meanwhile. The thread talks over a gloo group of its own, so that its
    collectives never meet those of training; to make that group the constructor is collective too.
    timeout_seconds: how long a rank waits there for the others.
    """

    def __init__(self, store: Store, mode: str = "async", keep: int = 2, timeout_seconds: float = 1800.0) -> None:
        self.store, self.mode, self.keep = store, mode, keep
        timeout = datetime.timedelta(seconds=timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        self._rank = dist.get_rank() if self._group else 0
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: tuple[int, Future[None]] | None = None

    def save(
        self,
        state: Mapping[str, Tensor],
        step: int,
        *,
        tokens: int = 0,
        config: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """Save `state` as the checkpoint of `step`, once the one before is complete. The rest is for the manifest.

        Raises PlaitError, on all ranks, where this save (sync) or the one before (async) failed on any of them.
        """
        self.wait()
        present = {key: tensor for key, tensor in state.items() if not is_absent(tensor)}
        parameters = {fqn: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for fqn, t in weights(present).items()}
        manifest = Manifest(step, tokens, config or {}, data or {}, versions or {}, parameters)
        if self.mode == "async":
            staged = {key: tensor.detach().to("cpu", copy=True) for key, tensor in present.items()}
            self._writing = step, self._thread.submit(self._write, staged, manifest, 0)
        else:
            _tell(step, lambda: self._write(present, manifest, 10_000_000))

    def wait(self) -> None:
        """Return when the last save is complete. To be called before the process group ends; raises as `save` does."""
        writing, self._writing = self._writing, None
        if writing is not None:
            _tell(writing[0], writing[1].result)

    def _write(self, state: dict[str, Tensor], manifest: Manifest, copy_ahead: int) -> None:
        path = self.store.temporary(manifest.step)
        if self._rank == 0:  # no rank writes a file before this one has joined the planning
            clear(path)
        writer = dcp.FileSystemWriter(path, per_thread_copy_ahead=copy_ahead)
        with warnings.catch_warnings(action="ignore") if self._group is None else nullcontext():  # "no process group"
            dcp.save(state, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
        digests = self._all(lambda: _digests(path, self._rank))
        files = {name: entry for own in digests for name, entry in sorted(own.items())}
        self._all(lambda: self._complete(path, manifest, files))

    def _complete(self, path: Path, manifest: Manifest, files: dict[str, tuple[int, str]]) -> None:
        if self._rank == 0:
            self.store.commit(path, attrs.evolve(manifest, files=files))
            self.store.prune(self.keep, newest=manifest.step)

    def _all(self, work: Callable[[], T]) -> list[T]:
        """What `work` returns on every rank, by rank; raises on all where it raised on one."""
        try:
            mine: tuple[T | None, str | None] = (work(), None)
        except Exception as error:
            mine = (None, _reason(error, self._rank))
        all_ranks: list[Any] = [mine]
        if self._group is not None:
            all_ranks = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(all_ranks, mine, group=self._group)
        for _, failure in all_ranks:
            if failure is not None:
                raise PlaitError(failure)
        return [value for value, _ in all_ranks]


def _digests(path: Path, rank: int) -> dict[str, tuple[int, str]]:
    """name -> (bytes, sha256) of the files that this rank wrote."""
    own = [*path.glob(f"__{rank}_*"), *([path / ".metadata"] if rank == 0 else [])]
    return {file.name: (os.path.getsize(file), digest(file)) for file in own}


def _tell(step: int, work: Callable[[], None]) -> None:
    try:
        work()
    except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
        raise PlaitError(f"the checkpoint of step {step} could not be saved: {_reason(error)}") from error


def _reason(error: BaseException, rank: int | None = None) -> str:
    if isinstance(error, dcp.CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
    text = str(error) or type(error).__name__
    return text if rank is None else f"{text} (rank {rank})"
