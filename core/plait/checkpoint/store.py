"""A folder of checkpoints: which are complete, which are sound, what each holds. Arithmetic on files, no torch."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from plait.checkpoint.files import digest, put_in_place, remove, write_synced
from plait.errors import PlaitError, near_miss

FORMAT = 1
MANIFEST = "manifest.json"


@attrs.frozen
class Manifest:
    """What is in a checkpoint beside its tensors; `manifest.json` in its folder, written last.

    step:       optimizer steps made.
    tokens:     tokens consumed, over all ranks.
    config:     the run's configuration, resolved.
    data:       what the data source needs to go on; JSON values.
    versions:   of Plait, torch and the plugins that wrote it.
    parameters: name -> (shape, dtype) of every parameter and persistent buffer.
    files:      name -> (bytes, sha256) of every other file in the folder.
    """

    step: int
    tokens: int = 0
    config: Mapping[str, Any] = attrs.field(factory=dict)
    data: Mapping[str, Any] = attrs.field(factory=dict)
    versions: Mapping[str, str] = attrs.field(factory=dict)
    parameters: Mapping[str, tuple[Sequence[int], str]] = attrs.field(factory=dict)
    files: Mapping[str, tuple[int, str]] = attrs.field(factory=dict)
    format: int = FORMAT

    def dumps(self) -> str:
        """JSON with a digest of itself, since a flipped bit may well leave valid JSON."""
        body = json.loads(json.dumps(attrs.asdict(self)))  # as a reader will see it: keys are strings by then
        return json.dumps({**body, "digest": _digest_of(body)}, indent=1) + "\n"

    @classmethod
    def loads(cls, text: bytes) -> "Manifest":
        """Raises ValueError, in words, where `text` is not what `dumps` wrote."""
        try:
            body = json.loads(text)
            claimed, version = body.pop("digest"), body["format"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"its {MANIFEST} is broken") from None
        if version != FORMAT:
            raise ValueError(f"its format is {version!r}, and this version of Plait reads {FORMAT}")
        if claimed != _digest_of(body):
            raise ValueError(f"its {MANIFEST} was changed after it was written")
        return cls(**body)


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class Store:
    """`folder/step-<n>/`, one a checkpoint. `step-<n>.tmp` is being written, `step-<n>.old` being removed.

    Only who holds the run's lock may call `commit`, `prune` and `clean`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def place(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def temporary(self, step: int) -> Path:
        return self.folder / f"step-{step}.tmp"

    def complete(self) -> list[Path]:
        """The checkpoints that were written to their end, by step; whether they are still sound, `verify` tells."""
        return [path for path in self._steps() if (path / MANIFEST).is_file()]

    def latest(self, say: Callable[[str], None] = print) -> Path | None:
        """The newest sound checkpoint, or None. Each damaged one on the way is named through `say`."""
        for path in reversed(self._steps()):
            why = self.verify(path)
            if why is None:
                return path
            say(f"skipping the damaged checkpoint {path}: {why}")
        return None

    @staticmethod
    def verify(path: str | os.PathLike[str]) -> str | None:
        """None if the checkpoint at `path` is sound, else what is wrong with it; reads every byte."""
        path = Path(path)
        if not path.is_dir():
            return "there is no such folder"
        try:
            manifest = Manifest.loads((path / MANIFEST).read_bytes())
        except FileNotFoundError:
            return f"it has no {MANIFEST}, so it was not written to its end"
        except OSError as error:
            return f"its {MANIFEST} cannot be read ({error})"
        except ValueError as error:
            return str(error)
        for name, (size, _) in manifest.files.items():
            file = path / name
            if not file.is_file():
                return f"its file {name} is missing"
            if file.stat().st_size != size:
                return f"its file {name} has {file.stat().st_size} bytes instead of {size}"
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:  # hashing lets go of the interpreter
            try:
                found = list(threads.map(lambda name: digest(path / name), manifest.files))
            except OSError as error:
                return f"it cannot be read ({error})"
        for (name, (_, expected)), actual in zip(manifest.files.items(), found, strict=True):
            if actual != expected:
                return f"its file {name} was changed after it was written (sha256 differs)"
        return None

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Manifest:
        """The manifest of the checkpoint at `path`. Raises PlaitError where there is none that can be read."""
        try:
            return Manifest.loads((Path(path) / MANIFEST).read_bytes())
        except OSError:
            raise PlaitError(f"{path} is no checkpoint: it has no {MANIFEST} that can be read") from None
        except ValueError as error:
            raise PlaitError(f"the checkpoint {path} cannot be used: {error}") from None

    @staticmethod
    def check_model(manifest: Manifest, parameters: Mapping[str, Sequence[int]]) -> None:
        """Raises PlaitError, naming the first that differs, unless the checkpoint has `parameters` (name -> shape)."""
        saved = {name: tuple(shape) for name, (shape, _) in manifest.parameters.items()}
        compare(saved, parameters, f"the checkpoint of step {manifest.step} is of another model")

    def commit(self, whole: Path, manifest: Manifest) -> Path:
        """Complete the checkpoint whose files are in `whole`: manifest last, then the final name; returns that path."""
        write_synced(whole / MANIFEST, manifest.dumps())
        put_in_place(whole, self.place(manifest.step))
        return self.place(manifest.step)

    def prune(self, keep: int, newest: int | None = None) -> None:
        """Remove all but the last `keep` complete checkpoints up to step `newest` (default: all there are).

        With `newest`, the step just saved, later ones of a run that went back count neither way: they may be damaged,
        and the run will replace them.
        """
        complete = [p for p in self.complete() if newest is None or _step(p) <= newest]
        for path in complete[: -max(keep, 1)]:
            remove(path)

    def clean(self) -> None:
        """Remove what a killed run left half done, and finish what only lacked its final name."""
        for path in sorted(self.folder.glob("step-*.tmp")):
            final = path.with_suffix("")
            if not final.exists() and self.verify(path) is None:
                put_in_place(path, final)
            else:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob("step-*.old"):
            shutil.rmtree(path, ignore_errors=True)

    def _steps(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = [p for p in self.folder.iterdir() if re.fullmatch(r"step-\d+", p.name) and p.is_dir()]
        return sorted(found, key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def compare(saved: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]], what: str) -> None:
    """Raises PlaitError `what: ...`, naming the first name or shape that differs between saved and wanted."""
    for name, shape in wanted.items():
        if name not in saved:
            raise PlaitError(f"{what}: it lacks {name!r}{near_miss(name, list(saved))}")
        if tuple(saved[name]) != tuple(shape):
            raise PlaitError(f"{what}: {name!r} has shape {tuple(saved[name])} there and {tuple(shape)} in this run")
    for name in saved:
        if name not in wanted:
            raise PlaitError(f"{what}: it has {name!r}, which this run's model has not{near_miss(name, list(wanted))}")
