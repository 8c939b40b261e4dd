"""Writing checkpoints: all ranks together, while training waits or goes on."""

import datetime
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from plait.checkpoint.files import clear, digest
from plait.checkpoint.finite import Extremes, where_to_go_on
from plait.checkpoint.store import Manifest, Store
from plait.contract.errors import DiskError, PlaitError, refused, sentence
from plait.parallel.state import is_absent, weights
from plait.system.disk import writing

T = TypeVar("T")
log = logging.getLogger("plait")


class Saver:
    """Saves into `store` and keeps the last `keep`. Every method is for all ranks, in the same order.

    mode "sync": `save` returns when the checkpoint is complete. "async": it returns with a copy of the state in this
    machine's memory, which a thread writes meanwhile. The thread talks over a gloo group of its own, so that its
    collectives never meet those of training; to make that group the constructor is collective too.
    timeout_seconds: how long a rank waits there for the others.
    resumed: the checkpoint that the run went on from, if its owner says so.
    saved: the last step whose checkpoint is complete.
    """

    def __init__(self, store: Store, mode: str = "async", keep: int = 2, timeout_seconds: float = 1800.0) -> None:
        self.store, self.mode, self.keep = store, mode, keep
        timeout = datetime.timedelta(seconds=timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        self._rank = dist.get_rank() if self._group else 0
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: tuple[int, Future[None]] | None = None
        self.resumed: Path | None = None
        self.saved: int | None = None

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

        Raises PlaitError, on all ranks, where this save (sync) or the one before (async) failed on any of them, and
        so if a parameter or the optimizer's state is not finite on any of them: then nothing is written.
        """
        self.wait()
        present = {key: tensor for key, tensor in state.items() if not is_absent(tensor)}
        parameters = {fqn: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for fqn, t in weights(present).items()}
        manifest = Manifest(step, tokens, config or {}, data or {}, versions or {}, parameters)
        extremes = Extremes(present)
        if self.mode == "async":
            staged = {key: tensor.detach().to("cpu", copy=True) for key, tensor in present.items()}
            bad = extremes.first_bad()  # the copy has waited for the device already
            self._writing = step, self._thread.submit(self._write, staged, manifest, 0, bad)
        else:
            _tell(step, lambda: self._write(present, manifest, 10_000_000, extremes.first_bad()))

    def wait(self) -> None:
        """Return when the last save is complete. To be called before the process group ends; raises as `save` does."""
        under_way, self._writing = self._writing, None
        if under_way is not None:
            _tell(under_way[0], under_way[1].result)

    def failed(self) -> bool:
        """Whether this rank knows already that the save under way failed. The others will: let all call `wait`."""
        return self._writing is not None and self._writing[1].done() and self._writing[1].exception() is not None

    def settle(self, seconds: float) -> None:
        """Give the save under way so long to end, however it does: for a run that breaks off."""
        if self._writing is not None:
            with suppress(TimeoutError):
                self._writing[1].exception(seconds)

    def _write(self, state: dict[str, Tensor], manifest: Manifest, copy_ahead: int, bad: str | None) -> None:
        for rank, found in enumerate(self._all(lambda: bad)):
            if found:
                raise PlaitError(f"{found} (rank {rank}); {where_to_go_on(self.store, self.resumed, self.saved)}")
        path = self.store.temporary(manifest.step)
        if self._rank == 0:  # no rank writes a file before this one has joined the planning
            clear(path)
        try:
            writer = _Writer(path, per_thread_copy_ahead=copy_ahead)
            quiet = warnings.catch_warnings(action="ignore") if self._group is None else nullcontext()
            with quiet:  # "no process group"
                dcp.save(state, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
            digests = self._all(lambda: _digests(path, self._rank))
            files = {name: entry for own in digests for name, entry in sorted(own.items())}
            self._all(lambda: self._complete(path, manifest, files))
        except (Exception, dcp.CheckpointException):
            if self._rank == 0:  # what it waits for above fails on all ranks at once: none writes any more
                clear(path)
            raise
        self.saved = manifest.step

    def _complete(self, path: Path, manifest: Manifest, files: dict[str, tuple[int, str]]) -> None:
        if self._rank == 0:
            with writing(path):
                self.store.commit(path, attrs.evolve(manifest, files=files))
            try:
                self.store.prune(self.keep, newest=manifest.step)
            except OSError as error:  # the checkpoint is good; the next save tries again
                log.warning(f"an older checkpoint could not be removed: {sentence(error)}")

    def _all(self, work: Callable[[], T]) -> list[T]:
        """What `work` returns on every rank, by rank; raises on all where it raised on one."""
        try:
            mine: tuple[T | None, PlaitError | None] = (work(), None)
        except Exception as error:
            mine = (None, _named(error, self._rank))
        all_ranks: list[Any] = [mine]
        if self._group is not None:
            all_ranks = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(all_ranks, mine, group=self._group)
        for _, failure in all_ranks:
            if failure is not None:
                raise failure
        return [value for value, _ in all_ranks]


def _digests(path: Path, rank: int) -> dict[str, tuple[int, str]]:
    """name -> (bytes, sha256) of the files that this rank wrote."""
    own = [*path.glob(f"__{rank}_*"), *([path / ".metadata"] if rank == 0 else [])]
    return {file.name: (os.path.getsize(file), digest(file)) for file in own}


class _Writer(dcp.FileSystemWriter):
    """torch's, whose errors say what the system said: some hide it, and lose it on their way to other ranks."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        with writing(self.path):
            return super().write_data(*args, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        with writing(self.path):
            super().finish(*args, **kwargs)


def _tell(step: int, work: Callable[[], None]) -> None:
    try:
        work()
    except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
        named = _named(error)
        raise type(named)(f"the checkpoint of step {step} could not be saved: {named}") from error


def _named(error: BaseException, rank: int | None = None) -> PlaitError:
    """What went wrong, and on which rank."""
    if isinstance(error, dcp.CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
    text = (sentence(error) if isinstance(error, OSError) else str(error)) or type(error).__name__
    return (DiskError if refused(error) else PlaitError)(text if rank is None else f"{text} (rank {rank})")
