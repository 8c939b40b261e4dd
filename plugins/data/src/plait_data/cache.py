"""A folder for what is computed once per machine: locks, atomic creation, digests of files."""

import codecs
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import compress
from pathlib import Path
from threading import Lock

from plait import PlaitError, misfit
from plait.host import cores, locked
from plait_data.documents import File
from plait_data.opened import naming, opened, strange

NOT_TEXT = "not text in UTF-8"
SECONDS = 2.0  # seconds between two lines of progress


def root(cache_dir: str | None) -> Path:
    """`data.cache_dir`, else the environment's PLAIT_CACHE, else ~/.cache/plait; the same from any working folder."""
    key = "data.cache_dir" if cache_dir else "PLAIT_CACHE"
    try:
        given = Path(cache_dir or os.environ.get("PLAIT_CACHE") or "~/.cache/plait").expanduser()
    except RuntimeError:  # pathlib's; such a container runs under a number that nobody gave a name
        raise PlaitError(
            "the cache of tokens has no place: this user has no home folder; set data.cache_dir, PLAIT_CACHE or HOME"
        ).at("data.cache_dir", cache_dir, fits="an absolute path") from None
    if not given.is_absolute():
        raise misfit(key, str(given), "an absolute path, so that every run finds the same cache")
    return given


class Progress:
    """Reports which share of `total` is done, at most every two seconds; reports nothing for shorter work.

    Several threads may add to it.
    """

    def __init__(self, say: Callable[[str], None], what: str, total: int) -> None:
        self._say, self._what, self._total = say, what, max(total, 1)
        self._done, self._next = 0, time.monotonic() + SECONDS
        self._lock = Lock()

    def add(self, amount: int) -> None:
        with self._lock:
            self._done += amount
            if time.monotonic() >= self._next:
                self._next = time.monotonic() + SECONDS
                self._say(f"{self._what}: {min(100 * self._done // self._total, 100)}%")


def ensure(
    target: Path, complete: Callable[[Path], bool], build: Callable[[Path], None], say: Callable[[str], None]
) -> None:
    """Create the folder `target` with `build(folder)` unless it is already `complete`.

    It appears complete or not at all. One process builds while the others wait; leftovers of a killed one are removed.
    """
    if complete(target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_suffix(".lock"), lambda: say("waiting for another process that prepares the same data")):
        for stale in target.parent.glob(f"{target.name}.*.part"):  # we hold the lock: its writer is dead
            shutil.rmtree(stale)
        if complete(target):
            return
        part = target.with_suffix(f".{os.getpid()}.part")
        part.mkdir()
        try:
            build(part)
            if target.exists():
                shutil.rmtree(target)
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def digests(files: list[File], folder: Path, say: Callable[[str], None]) -> list[str]:
    """A digest of each file's content; for a text file that is not text in UTF-8, "!" and what it is instead.

    An index in `folder` avoids reading them again while path, size and the system's stamps stay the same: the time of
    modification, which programs set (`rsync -t`), the time of any change, which none sets, and the inode. A file
    that changed in the last seconds may change again within the clock's resolution, and is not entered.
    """
    names = [str(file.path.absolute()) for file in files]
    index_file = folder / f"files-{hashlib.sha256(repr(names).encode()).hexdigest()[:16]}.json"
    try:
        read = json.loads(index_file.read_text(encoding="utf-8"))
        index = {name: (tuple(stamps), digest) for name, (stamps, digest) in read.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # damaged, or of another program
        index = {}
    fresh = [name not in index or index[name][0] != _stamps(file) for name, file in zip(names, files, strict=True)]
    if not any(fresh):
        return [index[name][1] for name in names]
    progress = Progress(say, "reading files", sum(file.size for file, new in zip(files, fresh, strict=True) if new))
    settled = time.time_ns() - int(SECONDS * 1e9)
    with ThreadPoolExecutor(cores()) as threads:
        changed = threads.map(lambda file: _digest(file, progress), compress(files, fresh))
        found = [next(changed) if new else index[name][1] for name, new in zip(names, fresh, strict=True)]
    index = {
        name: (_stamps(file), digest)
        for name, file, digest in zip(names, files, found, strict=True)
        if max(file.mtime_ns, file.ctime_ns) < settled
    }
    with suppress(OSError):  # a folder that cannot be written only costs time
        folder.mkdir(parents=True, exist_ok=True)
        part = index_file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(index), encoding="utf-8")
        part.replace(index_file)
    return found


def _stamps(file: File) -> tuple[int, ...]:
    return file.size, file.mtime_ns, file.ctime_ns, file.inode


def _digest(file: File, progress: Progress) -> str:
    digest = hashlib.blake2b(digest_size=16)
    if file.kind == "text":
        return _of_text(file, digest, progress)
    with naming(file.path), file.path.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
            progress.add(len(block))
    return digest.hexdigest()


def _of_text(file: File, digest: "hashlib.blake2b", progress: Progress) -> str:
    """Of the text itself, decompressed and without its byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    if what := strange(file.path, b""):
        return f"!{what}"
    with opened(file.path) as source:
        if what := strange(file.path, source.head):
            return f"!{what}"
        try:
            while block := source.content.read(1 << 20):
                digest.update(block)
                decoder.decode(block)
                before, done = done, source.position()
                progress.add(done - before)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return f"!{NOT_TEXT}"
    return digest.hexdigest()
