"""Keeps what takes long to make on this machine's disk, for later processes. An entry is used only as long as every
module that was loaded when it was made is the same file as then, unchanged."""

import contextlib
import functools
import hashlib
import io
import json
import os
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

MOST = 2000  # entries; beyond them the ones that were made first go
FILES = 1000  # of a folder that a config names; those beyond are not looked at
READ = 1 << 20  # bytes; of a larger file only the size and the time count
Arrays = Mapping[str, np.ndarray]
Code = dict[str, list[Any]]  # module -> its file, with the file's size and time of modification


class Shelf:
    """The folder `name` of PLAIT_CACHE, or else of ~/.cache/plait. Without a folder that can be written, it keeps
    nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, said: Iterable[Any]) -> dict[str, np.ndarray] | None:
        """The arrays that were kept for the same plain values `said`, by the same code."""
        with _unless_it_fails():
            count = len(sys.modules)
            _code(count)  # stamps files before a trace that may follow: while it runs, they may change
            with np.load(self._place(said), allow_pickle=False) as file:
                entry = dict(file)
            if _unchanged(self._folder(), _name_of(entry.pop("code")), count):
                return entry
        return None

    def keep(self, said: Iterable[Any], entry: Arrays) -> None:
        with _unless_it_fails():
            folder = self._folder()
            folder.mkdir(parents=True, exist_ok=True)
            code = json.dumps(_code(len(sys.modules)), sort_keys=True).encode()
            name = hashlib.sha256(code).hexdigest()
            content = io.BytesIO()
            np.savez_compressed(content, **{"code": np.frombuffer(name.encode(), np.uint8), **entry})  # type: ignore[arg-type]
            _write(self._place(said), content.getvalue())
            entries = sorted(folder.glob("*.npz"), key=lambda path: path.stat().st_mtime)
            for old in entries[:-MOST]:
                old.unlink(missing_ok=True)
            manifest = folder / f"{name}.json"
            if not manifest.exists() or manifest.read_bytes() != code:  # after its entry, so that one names it
                _write(manifest, code)
                _drop_unnamed(folder)

    def _folder(self) -> Path:
        return Path(os.environ.get("PLAIT_CACHE") or "~/.cache/plait").expanduser() / self.name

    def _place(self, said: Iterable[Any]) -> Path:
        text = json.dumps([torch.__version__, sys.prefix, *said], sort_keys=True, default=str)
        return self._folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.npz"


def _unless_it_fails() -> contextlib.suppress:
    """What is not kept is made again, so no trouble with the disk, and no damage, is worth a word."""
    return contextlib.suppress(Exception)


def _name_of(code: np.ndarray) -> str:
    return code.tobytes().decode()


def _write(place: Path, content: bytes) -> None:
    """Atomically, also beside processes of other machines that write the same."""
    part = place.with_name(f"{place.stem}.{uuid.uuid4().hex}{place.suffix}")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)


def _drop_unnamed(folder: Path) -> None:
    """Delete the manifests that no entry names."""
    manifests, named = list(folder.glob("*.json")), set()  # listed first: the entry of each is there before it
    for place in folder.glob("*.npz"):
        with _unless_it_fails(), np.load(place, allow_pickle=False) as file:
            named.add(_name_of(file["code"]))
    for manifest in manifests:
        if manifest.name.partition(".")[0] not in named:
            manifest.unlink(missing_ok=True)


@functools.lru_cache(1)  # a trace is asked for often, and modules are loaded seldom
def _code(count: int) -> Code:
    """Every module that is loaded, `count` in all, but torch's, whose version is in the key. The script that was
    started is known by its file alone."""
    loaded = [(n, str(m.__file__)) for n, m in list(sys.modules.items()) if getattr(m, "__file__", None)]
    own = [(n, file) for n, file in loaded if n.partition(".")[0] != "torch"]
    started = ("__main__", "__mp_main__")
    return {file if n in started else n: [file, *stamp] for n, file in own if (stamp := _stamp(file))}


@functools.cache  # the code that runs here is the one that was loaded
def _stamp(path: str) -> list[int] | None:
    with contextlib.suppress(OSError):
        state = os.stat(path)
        return [state.st_size, state.st_mtime_ns]
    return None


@functools.cache
def _unchanged(folder: Path, name: str, count: int) -> bool:
    """Whether the modules of a manifest are the same files here, those not loaded here included."""
    then: Code = json.loads((folder / f"{name}.json").read_bytes())
    now = _code(count)
    return all(now[n] == one if n in now else _stamp(one[0]) == one[1:] for n, one in then.items())


def named_files(values: Any) -> list[Any]:
    """Files, and those in folders, whose paths are among the plain `values`, with their sizes and times, and what
    stands in code and JSON: what a model reads may change without its config."""
    found: list[Any] = []
    for one in filter(None, _texts(values)):
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # too long, no home, or a zero byte: no path
            path = Path(one).expanduser().absolute()
            if path.exists():
                found.append(str(path))
                found += [_state(file) for file in ([path] if path.is_file() else islice(_files(path), FILES))]
    return found


def _files(folder: Path) -> Iterator[Path]:
    """In order; not those that python makes, or hidden folders."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith((".", "__pycache__")))
        yield from (Path(place, name) for name in sorted(names))


def _state(file: Path) -> list[Any]:
    try:
        state = file.stat()
        small = file.suffix in (".json", ".py") and state.st_size <= READ
        digest = hashlib.sha256(file.read_bytes()).hexdigest() if small else ""
        return [str(file), state.st_size, state.st_mtime_ns, digest]
    except OSError as error:
        return [str(file), str(error)]


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for one in values.values():
            yield from _texts(one)
    elif isinstance(values, list | tuple):
        for one in values:
            yield from _texts(one)
