"""What the simulated device was asked for between two moments, and which line of Python waited for it."""

import collections
import ctypes
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).resolve().parents[2]
DEVICE = ROOT / ".gpu-host" / "device"
LIBRARY = DEVICE / "libsimulatedgpu.so"
PYTHON = ROOT / ".gpu-host" / "bin" / "python"
LAUNCHES = ("kernel", "triton", "product", "fill")  # what runs on the device and is not a copy

HOOK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


def variables() -> dict[str, str]:
    """Of the environment: what a process needs to find the simulated device in place of NVIDIA's libraries."""
    return {"LD_LIBRARY_PATH": str(DEVICE), "TRITON_LIBCUDA_PATH": str(DEVICE), "OMP_NUM_THREADS": "1"}


def run_on_the_device() -> None:
    """Begin this program again with them, if it has not: the loader reads them when a process begins."""
    if os.environ.get("LD_LIBRARY_PATH") != str(DEVICE):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **variables()})


@attrs.frozen
class Wait:
    """A wait of the host for the device. where: lines of Python, the innermost of Plait's first."""

    what: str
    where: tuple[str, ...]


@attrs.frozen
class Counts:
    """kinds: (kind, name) -> (calls, bytes)."""

    kinds: dict[tuple[str, str], tuple[int, int]]
    waits: dict[Wait, int]

    def calls(self, *kinds: str) -> int:
        return sum(calls for (kind, _), (calls, _) in self.kinds.items() if kind in kinds)

    def bytes(self, *kinds: str) -> int:
        return sum(size for (kind, _), (_, size) in self.kinds.items() if kind in kinds)


class Counter:
    """Counts between `start` and `stop`; there is one device in a process, so one counter."""

    def __init__(self, folder: Path) -> None:
        """folder: for the list that the library writes."""
        self._library, self._list = ctypes.CDLL(str(LIBRARY)), folder / "counts.tsv"
        self._waits: collections.Counter[Wait] = collections.Counter()
        self._hook = HOOK(self._waited)  # must live as long as the library may call it

    def start(self) -> None:
        self._waits.clear()
        self._library.simulated_gpu_reset()
        self._library.simulated_gpu_on_wait(self._hook)

    def stop(self) -> Counts:
        self._library.simulated_gpu_on_wait(ctypes.cast(None, HOOK))
        if not self._library.simulated_gpu_write(str(self._list).encode()):
            raise OSError(f"cannot write {self._list}")
        kinds = {}
        for line in self._list.read_text(encoding="utf-8").splitlines():
            kind, calls, size, name = line.split("\t")
            kinds[kind, name] = int(calls), int(size)
        return Counts(kinds, dict(self._waits))

    def _waited(self, what: bytes) -> None:
        thread = threading.current_thread()
        lines = [*_lines(sys._getframe(1))]
        if thread is not threading.main_thread():
            lines = [f"thread {thread.name}", *lines]
        self._waits[Wait(what.decode(), tuple(lines))] += 1


def _lines(frame: Any) -> Iterable[str]:
    """The lines of Plait that wait, from the innermost on; where there are none, those of torch."""
    lines = []
    while frame is not None:
        path = frame.f_code.co_filename
        lines.append((path, f"{_short(path)}:{frame.f_lineno} {frame.f_code.co_name}"))
        frame = frame.f_back
    mine, others = f"{ROOT}/", (f"{ROOT}/tools/simulated_gpu/", f"{ROOT}/.gpu-host/")
    own = [line for path, line in lines if path.startswith(mine) and not path.startswith(others)]
    return (own or [line for _, line in lines])[:3]


def _short(path: str) -> str:
    parts = Path(path).parts
    return "/".join(parts[max((i for i, part in enumerate(parts) if part in ("src", "core")), default=-3) + 1 :])
