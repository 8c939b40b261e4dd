"""Writes checkpoints: all ranks together, while training waits or continues."""

import datetime
import logging
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.utils.serialization import config

from plait.checkpoint.best import name_best
from plait.checkpoint.finite import Extremes, where_to_go_on
from plait.checkpoint.hashed import HashedFiles
from plait.checkpoint.merged import merged
from plait.checkpoint.packed_chunks import in_chunks
from plait.checkpoint.pieces import Seal
from plait.checkpoint.replicas import with_replicas
from plait.checkpoint.staging import Staging
from plait.checkpoint.store import Manifest, Store
from plait.contract.errors import PlaitError
from plait.parallel.agreement import on_all_ranks
from plait.parallel.state import is_absent, weights
from plait.system import objects
from plait.system.disk import writing
from plait.system.errors import DiskError, refused, sentence

T = TypeVar("T")
WRITERS = 4  # threads of a rank that write, each a file of its own: one took 11 s for 15 GB beside an H200
log = logging.getLogger("plait")


class Saver:
    """Saves into `store` and keeps the last `keep`. All ranks call every method, in the same order.

    mode "sync": `save` returns when the checkpoint is complete. "async": it returns with a copy of the state in main
    memory, which a thread then writes. The thread uses its own gloo group, so that its collectives never mix with those
    of training; the constructor creates that group, so it is collective too.
    timeout_seconds: how long a rank waits there for the others.
    say: gets a line on rank 0 if an object store cannot be reached for 10 seconds.
    resumed: the checkpoint that the run continued from, if its owner sets it.
    saved: the last step whose checkpoint is complete.
    """

    def __init__(
        self,
        store: Store,
        mode: str = "async",
        keep: int = 2,
        timeout_seconds: float = 1800.0,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self.store, self.mode, self.keep, self._say = store, mode, keep, say
        timeout = datetime.timedelta(seconds=timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        self._rank = dist.get_rank() if self._group else 0
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: tuple[int, Future[None]] | None = None
        self._staging = Staging()
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
        known: Collection[str] = (),
    ) -> None:
        """Save `state` as the checkpoint of `step`, after the previous one is complete. The rest is for the manifest.

        Ranks may have other entries in `state` than others; of ranks that differ on purpose each has its own saved.
        known: FQNs of which some rank must have the weight.
        Raises PlaitError, on all ranks, if this save (sync) or the previous one (async) failed on any of them, if a
        parameter or the optimizer's state is not finite on any of them, if no rank has one of `known`, or if ranks have
        different values where they must be equal; then nothing is written.
        """
        self.wait()
        held, bound = with_replicas(state)
        present = {key: tensor for key, tensor in held.items() if not is_absent(tensor)}
        parameters = {fqn: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for fqn, t in weights(state).items()}
        data = {**(data or {}), **({"replicas": bound} if bound else {})}
        manifest = Manifest(step, tokens, config or {}, data, versions or {}, parameters)
        extremes = Extremes(present)
        if self.mode == "async":
            staged = self._staging.copy(present)  # nobody reads the copy of before: that save is complete
            bad = extremes.first_bad()  # the copy has already waited for the device
            self._writing = step, self._thread.submit(self._write, staged, manifest, known, 0, bad)
        else:
            _tell(step, lambda: self._write(present, manifest, known, 10_000_000, extremes.first_bad()))

    def wait(self) -> None:
        """Return when the last save is complete. Call it before the process group ends; raises as `save` does."""
        under_way, self._writing = self._writing, None
        if under_way is not None:
            _tell(under_way[0], under_way[1].result)

    def failed(self) -> bool:
        """Whether this rank already knows that the current save failed. The others will: then all must call `wait`."""
        return self._writing is not None and self._writing[1].done() and self._writing[1].exception() is not None

    def settle(self, seconds: float) -> None:
        """Wait up to this time for the current save to end, successfully or not: for a run that ends early."""
        if self._writing is not None:
            with suppress(TimeoutError):
                self._writing[1].exception(seconds)

    def _write(
        self, state: dict[str, Tensor], manifest: Manifest, known: Collection[str], copy_ahead: int, bad: str | None
    ) -> None:
        path = self.store.temporary(manifest.step)

        def ready() -> str | None:
            if self._rank == 0:  # before any rank creates the folder, whose creation fails if it is removed meanwhile
                self.store.make_room(manifest.step)
            return bad

        for rank, found in enumerate(self._all(ready)):
            if found:
                raise PlaitError(f"{found} (rank {rank}); {where_to_go_on(self.store, self.resumed, self.saved)}")
        manifest = attrs.evolve(manifest, parameters=merged(manifest.parameters, self._all, known)[0])
        try:
            files = self._until_reached(lambda: self._parts(path, state, copy_ahead))
            self._all(lambda: self._complete(path, manifest, files))
        except (Exception, dcp.CheckpointException) as error:
            if self._rank == 0 and not _unreachable(error):
                with suppress(PlaitError):  # an error in the wait above is raised on all ranks, so none is writing now
                    self.store.make_room(manifest.step)
            raise
        self.saved = manifest.step

    def _parts(self, path: Path, state: dict[str, Tensor], copy_ahead: int) -> dict[str, Seal]:
        """Write what all ranks have of `state`; the entries of their files for the manifest."""
        writer = _Writer(path, per_thread_copy_ahead=copy_ahead, thread_count=min(WRITERS, torch.get_num_threads()))
        quiet = warnings.catch_warnings(action="ignore") if self._group is None else nullcontext()
        # torch warns that there is no group. It never compares its own checksums, so it need not compute them.
        with quiet, config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            chunks, group = in_chunks(state), self._group
            dcp.save(chunks, storage_writer=writer, process_group=group, no_dist=group is None)
        return {name: seal for own in self._all(writer.seal) for name, seal in own.items()}

    def _until_reached(self, write: Callable[[], T]) -> T:
        """What `write` returns. If an object store cannot be reached, all ranks begin anew together, for a minute."""
        begun, pause, told = time.monotonic(), 1.0, False
        while True:
            try:
                return write()
            except (Exception, dcp.CheckpointException) as error:
                waited = time.monotonic() - begun
                goes_on = bool(why := _unreachable(error)) and waited < objects.PATIENCE
                if not self._all(partial(bool, goes_on))[0]:
                    raise
                if self._rank == 0 and waited > objects.QUIET and not told:
                    self._say(f"{why}; trying again for up to {objects.PATIENCE:g} s, while training goes on")
                    told = True
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _complete(self, path: Path, manifest: Manifest, files: dict[str, Seal]) -> None:
        if self._rank == 0:
            with writing(path):
                self.store.commit(path, attrs.evolve(manifest, files=files))
            best = (manifest.data.get("best") or {}).get("step") or None  # 0: no loss was finite so far
            try:
                if best is not None:
                    name_best(self.store, best)
                self.store.prune(self.keep, newest=manifest.step, best=best)
            except OSError as error:  # the checkpoint is good; the next save tries again
                log.warning(f"an older checkpoint could not be removed: {sentence(error)}")

    def _all(self, work: Callable[[], T]) -> list[T]:
        return on_all_ranks(work, self._group, lambda error: _named(error, self._rank))


class _Writer(dcp.FileSystemWriter):
    """torch's writer, with errors that contain the system's: torch may hide it, and lose it between ranks."""

    def __init__(self, path: Path, *args: Any, **kwargs: Any) -> None:
        self.hashed = HashedFiles()
        if at_address := not isinstance(path, Path):
            from plait.checkpoint.hashed_objects import HashedObjects

            self.hashed = HashedObjects()
        super().__init__("" if at_address else path, *args, **kwargs)
        self.path, self.fs, self.sync_files = path, self.hashed, not at_address

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        with writing(self.path):
            written = super().write_data(*args, **kwargs)
            if self.hashed.failed:
                raise self.hashed.failed[0]
            return written

    def finish(self, *args: Any, **kwargs: Any) -> None:
        with writing(self.path):
            super().finish(*args, **kwargs)

    def seal(self) -> dict[str, Seal]:
        """The entries of this rank's files for the manifest."""
        with writing(self.path):
            return self.hashed.seal(cast(Path, self.path))

    @property
    def checkpoint_id(self) -> Path | str:
        """What `.metadata` holds of the place; nobody reads it."""
        return self.path if isinstance(self.path, Path) else str(self.path)


def _tell(step: int, work: Callable[[], None]) -> None:
    try:
        work()
    except (Exception, dcp.CheckpointException) as error:  # the latter is not an Exception
        named = _named(error)
        raise type(named)(f"the checkpoint of step {step} could not be saved: {named}") from error


def _named(error: BaseException, rank: int | None = None) -> PlaitError:
    """What went wrong, and on which rank."""
    if isinstance(error, dcp.CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
    text = (sentence(error) if isinstance(error, OSError) else str(error)) or type(error).__name__
    kind = (
        objects.Unreachable if isinstance(error, objects.Unreachable) else DiskError if refused(error) else PlaitError
    )
    return kind(text if rank is None else f"{text} (rank {rank})")


def _unreachable(error: BaseException) -> str | None:
    """Why, if an object store could not be reached on some rank."""
    errors = [each for each, _ in error.failures.values()] if isinstance(error, dcp.CheckpointException) else [error]
    return next((str(each) for each in errors if isinstance(each, objects.Unreachable)), None)
