"""Keeps what takes long to make on this machine's disk, for later processes. An entry is used only as long as every
file of code that was loaded when it was made is what it was then."""

import contextlib
import functools
import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plait import PlaitError
from plait.host import replace

MOST = 2000  # entries; beyond them the ones that were made first go
Arrays = Mapping[str, np.ndarray]


class Shelf:
    """The folder `name` of PLAIT_CACHE, or else of ~/.cache/plait. Without a folder that can be written, it keeps
    nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, said: Iterable[Any]) -> dict[str, np.ndarray] | None:
        """The arrays that were kept for the same plain values `said`, by the same code."""
        with _unless_it_fails():
            with np.load(self._place(said), allow_pickle=False) as file:
                entry = dict(file)
            if _unchanged(self._folder(), entry.pop("code").tobytes().decode()):
                return entry
        return None

    def keep(self, said: Iterable[Any], entry: Arrays) -> None:
        with _unless_it_fails():
            folder, place = self._folder(), self._place(said)
            folder.mkdir(parents=True, exist_ok=True)
            code = json.dumps(_code(), sort_keys=True).encode()
            name = hashlib.sha256(code).hexdigest()
            if not (manifest := folder / f"{name}.json").exists():
                replace(manifest, code)
            part = place.with_suffix(f".{os.getpid()}.npz")
            np.savez_compressed(part, **{"code": np.frombuffer(name.encode(), np.uint8), **entry})  # type: ignore[arg-type]
            part.replace(place)
            entries = sorted(folder.glob("*.npz"), key=lambda path: path.stat().st_mtime)
            for old in entries[:-MOST]:
                old.unlink(missing_ok=True)

    def _folder(self) -> Path:
        return Path(os.environ.get("PLAIT_CACHE") or "~/.cache/plait").expanduser() / self.name

    def _place(self, said: Iterable[Any]) -> Path:
        text = json.dumps([torch.__version__, *said], sort_keys=True, default=str)
        return self._folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.npz"


@contextlib.contextmanager
def _unless_it_fails() -> Iterator[None]:
    """What is not kept is made again, so no trouble with the disk is worth a word."""
    with contextlib.suppress(OSError, PlaitError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile):
        yield


def _code() -> dict[str, list[int]]:
    """File -> its size and time of modification, of every module that is loaded; torch has its version in the key."""
    files = {str(m.__file__) for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
    torchs = str(Path(torch.__file__).parent)
    return {path: stamp for path in sorted(files) if not path.startswith(torchs) and (stamp := _stamp(path))}


@functools.cache  # the code that runs here is the one that was loaded
def _stamp(path: str) -> list[int] | None:
    with contextlib.suppress(OSError):
        state = os.stat(path)
        return [state.st_size, state.st_mtime_ns]
    return None


@functools.cache
def _unchanged(folder: Path, name: str) -> bool:
    code: dict[str, list[int]] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return all(_stamp(path) == stamp for path, stamp in code.items())


def named_files(values: Any) -> list[Any]:
    """Files, and those in folders, whose paths are among the plain `values`, with their sizes and times: what a model
    reads may change without its config."""
    found: list[Any] = []
    for one in _texts(values):
        path = Path(one).expanduser() if "/" in one else None
        with contextlib.suppress(OSError, RuntimeError):
            if path is not None and path.exists():
                files = sorted(path.iterdir()) if path.is_dir() else [path]
                found += [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return found


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for one in values.values():
            yield from _texts(one)
    elif isinstance(values, list | tuple):
        for one in values:
            yield from _texts(one)
