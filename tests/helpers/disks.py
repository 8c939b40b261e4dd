"""Disks that fill up: small ones, really mounted if this user may, else played by a library in front of libc.

    with small_disk(8) as disk:                    # 8 MB
        start a command with {**os.environ, **disk.env}
        disk.fill(100_000)                         # now 100 kB are free
        disk.empty()                               # there is room again

`disk.env` is empty for a real disk. Raises CannotMount if neither can be had. Within one process, `limited` needs no
disk at all.
"""

import contextlib
import errno
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs

MB = 1 << 20
SHIM = Path(__file__).with_name("small_disk.c")
ROOM, NUMBER = 0, 8  # where the shim's control file has the bytes that are free, and the errno of what does not fit


class CannotMount(Exception):
    """Why there is no small disk here."""


@attrs.define
class Disk:
    """path: its folder. env: what a command needs in its environment to see it."""

    path: Path
    env: dict[str, str] = attrs.field(factory=dict)
    _control: Path | None = None

    def free(self) -> int:
        if self._control is None:
            found = os.statvfs(self.path)
            return found.f_bavail * found.f_frsize
        return _peek(self._control)

    def fill(self, free: int = 0) -> None:
        """Leave at most `free` bytes of room, rounded up to a block, whatever else is writing."""
        if self._control is not None:
            _poke(self._control, ROOM, min(free, self.free()))
        else:
            fill(self.path, free)

    def empty(self) -> None:
        """Take back what `fill` did."""
        if self._control is not None:
            _poke(self._control, ROOM, 1 << 40)
        (self.path / BALLAST).unlink(missing_ok=True)

    def refuse(self, number: int) -> None:
        """Let what does not fit fail with errno `number`, not ENOSPC. Only a shim can: raises CannotMount."""
        if self._control is None:
            raise CannotMount("a real disk says only that it is full")
        _poke(self._control, NUMBER, number)


BALLAST = ".ballast"


@contextlib.contextmanager
def small_disk(megabytes: float, folder: Path | None = None, shim: bool = False) -> Iterator[Disk]:
    """A disk of so many MB at `folder`, which is made if there is none; default: a new temporary folder.

    shim: take the library in any case. The disk is gone afterwards, with what it held.
    """
    made = tempfile.mkdtemp(prefix="small-disk-") if folder is None else None
    at = Path(made or folder or "").absolute()
    at.mkdir(parents=True, exist_ok=True)
    try:
        if not shim and _mounted(at, megabytes):
            try:
                yield Disk(at)
            finally:
                subprocess.run(["umount", "-l", at], check=True)
        else:
            with tempfile.TemporaryDirectory(prefix="shim-") as scratch:
                yield _played(at, megabytes, Path(scratch))
    finally:
        if made:
            shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def limited(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: writes take a part, then fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(folder: Path, free: int = 0) -> Path:
    """Fill the real, small disk of `folder` until at most `free` bytes are left; returns the file, to be removed."""
    found = os.statvfs(folder)
    if found.f_blocks * found.f_frsize > 256 * MB:
        raise CannotMount(f"{folder} is not on a small disk")
    ballast = folder / BALLAST
    with ballast.open("ab", buffering=0) as file:
        while True:
            found = os.statvfs(folder)
            left = found.f_bavail * found.f_frsize - free
            if left <= 0:
                return ballast
            try:
                file.write(bytes(min(left, MB)))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return ballast


def _mounted(at: Path, megabytes: float) -> bool:
    if sys.platform != "linux" or shutil.which("mount") is None:
        return False
    size = f"size={int(megabytes * MB)}"
    return not subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", at], capture_output=True).returncode


def _played(at: Path, megabytes: float, scratch: Path) -> Disk:
    """What a library in front of libc makes of `at`. Raises CannotMount if none can be built."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        raise CannotMount("no disk can be mounted here, and no C compiler can build one to play with")
    library, control = scratch / "small_disk.so", scratch / "control"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SHIM, "-ldl"], check=True)
    control.write_bytes(struct.pack("qq", int(megabytes * MB), errno.ENOSPC))
    env = {"LD_PRELOAD": str(library), "SMALL_DISK_AT": f"{at}/", "SMALL_DISK_CONTROL": str(control)}
    return Disk(at, env, control)


def _peek(control: Path) -> int:
    return struct.unpack("q", control.read_bytes()[:8])[0]


def _poke(control: Path, offset: int, value: int) -> None:
    handle = os.open(control, os.O_WRONLY)
    os.pwrite(handle, struct.pack("q", value), offset)
    os.close(handle)
