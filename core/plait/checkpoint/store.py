"""A folder of checkpoints: which are complete, which are sound, and what each holds. Works on files, without torch."""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from plait.checkpoint.files import clear, put_in_place, remove, write_synced
from plait.checkpoint.pieces import Damaged, Seal
from plait.checkpoint.wellformed import flaw
from plait.contract.errors import PlaitError, near_miss
from plait.system.disk import place

log = logging.getLogger("plait")
FORMAT = 2
MANIFEST = "manifest.json"


class NoneSound(PlaitError):
    """There are checkpoints, and all are damaged; starting over beside them could lose what may be repaired."""


@attrs.frozen
class Manifest:
    """The description of a checkpoint besides its tensors; `manifest.json` in its folder, written last.

    step:       optimizer steps made.
    tokens:     tokens consumed, over all ranks.
    config:     the run's configuration, resolved.
    data:       what the data source needs to continue, and what else a run needs of the one before; JSON values.
    versions:   of Plait, torch and the plugins that wrote it.
    parameters: name -> (shape, dtype) of every parameter and persistent buffer.
    files:      name -> (bytes, sha256) of every other file in the folder; (bytes, None) if it has a `.pieces`.
    """

    step: int
    tokens: int = 0
    config: Mapping[str, Any] = attrs.field(factory=dict)
    data: Mapping[str, Any] = attrs.field(factory=dict)
    versions: Mapping[str, str] = attrs.field(factory=dict)
    parameters: Mapping[str, tuple[Sequence[int], str]] = attrs.field(factory=dict)
    files: Mapping[str, Seal] = attrs.field(factory=dict)
    format: int = FORMAT

    def dumps(self) -> str:
        """JSON with a digest of itself, because a flipped bit may leave valid JSON."""
        body = json.loads(json.dumps(attrs.asdict(self)))  # as a reader will see it: keys are strings then
        return json.dumps({**body, "digest": _digest_of(body)}, indent=1) + "\n"

    @classmethod
    def loads(cls, text: bytes) -> "Manifest":
        """Raises ValueError, in words, if `text` is not what `dumps` wrote."""
        try:
            body = json.loads(text)
            claimed, version = body.pop("digest"), body["format"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"its {MANIFEST} is broken") from None
        if version != FORMAT:
            raise ValueError(f"its format is {version!r}, and this version of Plait reads {FORMAT}")
        if claimed != _digest_of(body):
            raise ValueError(f"its {MANIFEST} was changed after it was written")
        if wrong := flaw(body, attrs.fields_dict(cls).keys()):
            raise ValueError(f"its {MANIFEST} holds something that this version of Plait does not write: {wrong}")
        return cls(**body)


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def samples_of(manifest: Manifest, global_batch_size: int) -> int:
    """The samples consumed up to `manifest`; of a checkpoint that another loop saved, one global batch per step."""
    return manifest.data.get("samples", manifest.step * global_batch_size)


class Store:
    """`folder/step-<n>/`, one per checkpoint. `step-<n>.tmp` is being written, `step-<n>.old` being removed.
    `open_store` also opens an address, such as s3://bucket/run.

    A checkpoint knows its step: if the manifest and the folder's name disagree, it is left alone.
    Only the holder of the run's lock may call `commit`, `prune` and `clean`.
    damaged: path -> what is wrong with a checkpoint, for those that somebody found damaged while reading them.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = place(folder)
        self.damaged: dict[Path, str] = {}
        self._unsound: set[Path] = set()  # found by `latest`
        self._said: set[Path] = set()

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def temporary(self, step: int) -> Path:
        return self.folder / f"step-{step}.tmp"

    def found(self) -> list[Path]:
        """Everything that is named as a checkpoint, by step: complete or not, a folder or not."""
        if not os.path.lexists(self.folder):
            return []
        try:
            paths = [path for path in self.folder.iterdir() if re.fullmatch("step-[0-9]+", path.name)]
        except OSError as error:
            raise PlaitError(
                f"the checkpoints in {self.folder} cannot be read: {error.strerror}; set checkpoint.dir "
                "to use another folder"
            ) from None
        return sorted(paths, key=_step)

    def complete(self) -> list[Path]:
        """The checkpoints that were written completely, by step; without those that `latest` found damaged.

        `verify` checks whether they are still sound.
        """
        bad = self._unsound | self.damaged.keys()
        return [path for path in self.found() if path not in bad and path.name == f"step-{_says(path)}"]

    def latest(self, say: Callable[[str], None] = print) -> Path | None:
        """The newest checkpoint that looks sound, or None if there are none. Names each other one once through `say`.

        Reads no tensors: who loads it compares their digests, enters it in `damaged` if they differ, and asks again.
        Raises NoneSound, naming each, if there are some and none looks sound.
        """
        problems: dict[Path, str] = {}
        for path in reversed(self.found()):
            why = self.problem(path)
            if why is None:
                for bad, reason in problems.items():
                    if bad not in self._said:
                        say(f"skipping the checkpoint {bad}: {reason}")
                self._said |= problems.keys()
                return path
            self._unsound.add(path)
            problems[path] = why
        if problems:
            each = "; ".join(f"{path.name}: {why}" for path, why in problems.items())
            raise NoneSound(f"no checkpoint in {self.folder} is sound: {each}")
        return None

    def problem(self, path: Path) -> str | None:
        """None if `path` looks like a sound checkpoint of the step in its name, else what is wrong with it."""
        step = _says(path)
        if step is not None and path.name != f"step-{step}":
            return f"it is the checkpoint of step {step}, copied or renamed"
        return self.damaged.get(path) or self.quick_problem(path)

    @staticmethod
    def quick_problem(path: str | os.PathLike[str]) -> str | None:
        """What is wrong with the checkpoint at `path`, as far as its manifest and the sizes of its files show."""
        path = place(path)
        if not path.is_dir():
            return "it is not a folder" if path.is_symlink() or path.exists() else "there is no such folder"
        if not (path / MANIFEST).is_file():  # nor a pipe, which would never end
            return f"it has no {MANIFEST}, so it was not written completely"
        try:
            manifest = Manifest.loads((path / MANIFEST).read_bytes())
        except OSError as error:
            return f"its {MANIFEST} cannot be read ({error})"
        except ValueError as error:
            return str(error)
        sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
        for name, (size, _) in manifest.files.items():
            if name not in sizes:
                return f"its file {name} is missing"
            if sizes[name] != size:
                return f"its file {name} has {sizes[name]} bytes instead of {size}"
        return None

    @classmethod
    def verify(cls, path: str | os.PathLike[str]) -> str | None:
        """None if the checkpoint at `path` is sound, else what is wrong with it; reads every byte."""
        from plait.checkpoint.checked import first_change  # a run that saves reads nothing

        if problem := cls.quick_problem(path):
            return problem
        path, files = place(path), cls.read(path).files
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:  # hashing releases Python's lock
            changes = list(threads.map(lambda name: first_change(path, name, files), files))
        return next((why for why in changes if why), None)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Manifest:
        """The manifest of the checkpoint at `path`. Raises Damaged if none can be read."""
        try:
            if not (manifest := place(path) / MANIFEST).is_file():
                raise FileNotFoundError
            return Manifest.loads(manifest.read_bytes())
        except OSError:
            raise Damaged(f"{path} is not a checkpoint: it has no {MANIFEST} that can be read") from None
        except ValueError as error:
            raise Damaged.because(path, str(error)) from None

    @staticmethod
    def check_model(manifest: Manifest, parameters: Mapping[str, Sequence[int]]) -> None:
        """Raises PlaitError, naming the first difference, unless the checkpoint has `parameters` (name -> shape)."""
        saved = {name: tuple(shape) for name, (shape, _) in manifest.parameters.items()}
        compare(saved, parameters, f"the checkpoint of step {manifest.step} is of another model")

    @staticmethod
    def check_replicas(manifest: Manifest, ranks: Mapping[str, int]) -> None:
        """Raises PlaitError unless there are as many replicas as were saved, if a strategy refuses any other number.

        ranks: axis -> how many ranks are along it, of each with sums=False.
        """
        for axis, (strategy, saved) in manifest.data.get("replicas", {}).items():
            if (here := ranks.get(axis, 1)) != saved:
                raise PlaitError(
                    f"strategy {strategy!r} lets no other number of replicas go on than was saved (replicas = "
                    f"'refuse'): the checkpoint of step {manifest.step} has {saved} along the axis {axis!r}, and here "
                    f"{'is' if here == 1 else 'are'} {here}"
                ).at(f"strategy.{strategy}", here, fits=(saved,))

    def commit(self, whole: Path, manifest: Manifest) -> Path:
        """Complete the checkpoint whose files are in `whole`: write the manifest, then rename it; returns the final
        path.

        A damaged checkpoint of that step is replaced. Anything else with its name is kept as `step-<n>.kept-1`.
        """
        write_synced(whole / MANIFEST, manifest.dumps())
        self._give_name(whole, manifest.step)
        return self.path_of(manifest.step)

    def prune(self, keep: int, newest: int | None = None, best: int | None = None) -> None:
        """Remove all but the last `keep` complete checkpoints up to step `newest` (default: all), and that of `best`.

        `newest` is the step just saved. Later checkpoints of a run that went back are ignored: the run will replace
        them. Checkpoints that `latest` found damaged are ignored too: they must not push out a sound one.
        """
        complete = [p for p in self.complete() if newest is None or _step(p) <= newest]
        for path in complete[: -max(keep, 1)]:
            if best is None or path != self.path_of(best):
                self.remove(path)

    def make_room(self, step: int) -> None:
        """Remove what an earlier save of `step` left half done."""
        clear(self.temporary(step))

    def remove(self, path: Path) -> None:
        """Remove the checkpoint at `path`."""
        remove(path)

    def clean(self) -> None:
        """Remove what a killed run left half done, and rename what only lacked its final name."""
        for path in self._left_over("tmp"):
            step, final = _step(path), self.path_of(_step(path))
            if self._sound(path, step) and not self._sound(final, step):
                self._give_name(path, step)
            else:
                clear(path)
        for path in self._left_over("old"):
            if not self.complete() and self._sound(path, _step(path)):
                self._give_name(path, _step(path))  # the newer one was lost
            else:
                clear(path)

    def _left_over(self, suffix: str) -> list[Path]:
        """The newest first."""
        folders = self.folder.glob(f"step-*.{suffix}") if self.folder.is_dir() else []
        return sorted((p for p in folders if re.fullmatch("step-[0-9]+", p.stem)), key=_step, reverse=True)

    def _sound(self, path: Path, step: int) -> bool:
        return _says(path) == step and self.verify(path) is None

    def _give_name(self, whole: Path, step: int) -> None:
        final = self.path_of(step)
        if os.path.lexists(final) and not (final.is_dir() and _says(final) in (None, step)):
            number = 1
            while os.path.lexists(kept := final.with_name(f"{final.name}.kept-{number}")):
                number += 1
            os.rename(final, kept)
            log.warning("%s was not a checkpoint of step %d; it is now %s", final, step, kept)
        put_in_place(whole, final)
        self._unsound.discard(final)
        self.damaged.pop(final, None)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _says(path: Path) -> int | None:
    """The step in its manifest; None if no manifest can be read."""
    try:
        return Store.read(path).step
    except PlaitError:
        return None


def compare(saved: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]], what: str) -> None:
    """Raises PlaitError `what: ...`, naming the first name or shape that differs between saved and wanted."""
    for name, shape in wanted.items():
        if name not in saved:
            raise PlaitError(f"{what}: it lacks {name!r}{near_miss(name, list(saved))}")
        if tuple(saved[name]) != tuple(shape):
            raise PlaitError(f"{what}: {name!r} has shape {tuple(saved[name])} there and {tuple(shape)} in this run")
    for name in saved:
        if name not in wanted:
            raise PlaitError(
                f"{what}: it has {name!r}, which this run's model does not have{near_miss(name, list(wanted))}"
            )
