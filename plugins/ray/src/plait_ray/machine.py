"""The actor on each node, which runs `plait train` there and passes on what it prints."""

import contextlib
import ctypes
import functools
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO

import attrs

PASSED = ("PLAIT_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "HF_", "WANDB_")  # of the driver's environment
PR_SET_PDEATHSIG = 1

Printed = tuple[int, str]  # 1: standard output, 2: standard error; the text


@attrs.frozen
class Place:
    """Where an actor is. port: free there."""

    node: str
    host: str
    ip: str
    port: int

    def __str__(self) -> str:
        return f"{self.host} ({self.ip}, Ray's node {self.node[:8]})"


class Machine:
    """Its methods are called from several threads, because `output` waits."""

    def __init__(self) -> None:
        self._printed: queue.SimpleQueue[Printed | int] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self._early = 0  # a signal that came before the process was there

    def place(self) -> Place:
        import ray

        node = ray.get_runtime_context().get_node_id()
        return Place(node, socket.gethostname(), ray.util.get_node_ip_address(), _free_port())

    def begin(self, folder: str, overrides: list[str], env: Mapping[str, str], listens: tuple[str, int] | None) -> str:
        """Starts `plait train` in `folder`. Returns what is wrong here if that is impossible. listens: an address here,
        at which it listens when this returns, unless it has ended."""
        if not os.path.isdir(folder):
            return f"there is no folder {folder}, and all nodes must see the run's current folder: share it"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PASSED)}
        begun: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        # The system kills the process when the thread that began it ends, and Ray's threads may.
        run = functools.partial(self._run, [*overrides], folder, {**inherited, **env}, begun.put)
        threading.Thread(target=run, daemon=True).start()
        if (error := begun.get()) is not None:
            raise error
        if self._early:
            self.signal(self._early)
        while listens and self._process is not None and self._process.poll() is None:
            try:
                socket.create_connection(listens, 1).close()
                break
            except OSError:
                time.sleep(0.05)
        return ""

    def _run(
        self, overrides: list[str], folder: str, env: dict[str, str], begun: Callable[[Exception | None], None]
    ) -> None:
        """The process, from its beginning to its end. begun(error): called once."""
        prctl = ctypes.CDLL(None).prctl
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "plait", "train", *overrides],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
                preexec_fn=lambda: _asked_to_stop(prctl),
            )
        except Exception as error:
            begun(error)
            return
        begun(None)
        streams = enumerate((process.stdout, process.stderr), 1)
        readers = [threading.Thread(target=self._read, args=(number, stream)) for number, stream in streams]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        self._printed.put(process.wait())

    def output(self) -> tuple[list[Printed], int | None]:
        """Waits for what is printed next. Returns it, and the exit code once all is printed."""
        texts: list[Printed] = []
        while not texts or not self._printed.empty():
            item = self._printed.get()
            if isinstance(item, int):
                return texts, item
            texts.append(item)
        return texts, None

    def signal(self, number: int) -> None:
        if self._process is None:
            self._early = number
        elif self._process.poll() is None:
            self._process.send_signal(number)

    def _read(self, number: int, stream: IO[str]) -> None:
        for line in stream:
            self._printed.put((number, line))


def _free_port() -> int:
    """One that neither Ray's workers nor the system's connections take meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def _asked_to_stop(prctl: "ctypes._NamedFuncPointer") -> None:
    """In the new process: Ray's workers ignore SIGINT, which asks a run to stop; and none outlives its actor."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
