"""Where a run lives while faults befall it: folders of its own, its command, and what that left behind."""

import contextlib
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from plait_testing.warm import be_plait, dies_with_parent
from tests.faults.inject import sitecustomize

MODEL = (
    *("model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=48"),
    *("train.seq_len=32", "train.local_batch_size=2", "schedule.warmup_steps=4", "metrics.tensorboard=false"),
    *("validation.interval=8", "validation.batches=1", "launch.device=cpu", "run.name=a"),
)
SHORT = ("train.steps=24", "checkpoint.interval=4")
LONG = ("train.steps=96", "checkpoint.interval=6", "launch.max_restarts=1000")
LAYOUTS = {
    "one process": ("strategy=[]",),
    "fsdp2": ("strategy=[fsdp2]", "launch.nproc_per_node=2"),
    "tensor_parallel": ("strategy=[tensor_parallel]", "launch.nproc_per_node=2"),
}
TP = ("strategy=[tensor_parallel,fsdp2]", "strategy.tensor_parallel.degree=2")
SEVERAL = {  # on several machines: how often, how many, and the ranks of each
    "fsdp2 on 2 machines": (6, 2, 1, ("strategy=[fsdp2]",)),
    "fsdp2 on 3 machines": (2, 3, 1, ("strategy=[fsdp2]",)),
    "fsdp2 on 4 machines": (1, 4, 1, ("strategy=[fsdp2]",)),
    "fsdp2 on 2 machines of 2 ranks": (1, 2, 2, ("strategy=[fsdp2]",)),
    "tensor_parallel and fsdp2 on 2 machines of 2 ranks": (1, 2, 2, TP),
}
EXACT = (*(f"precision.{each}=float64" for each in ("param", "reduce", "storage")), "schedule.min_lr_ratio=1")
LAYOUTS |= {
    name: (*strategy, f"launch.nproc_per_node={machines * ranks}")
    for name, (_, machines, ranks, strategy) in SEVERAL.items()
}
LAYOUTS["elastic"] = ("strategy=[fsdp2]", "train.global_batch_size=12", *EXACT, "launch.nproc_per_node=1")
KERNEL_THREADS = "2"  # the process that is the parent of all of them
SECONDS = 600.0  # after which a command counts as hung


@attrs.frozen
class Ended:
    """A command that ended. code: as a shell sees it, negative for a signal. text: all that it printed."""

    code: int
    text: str
    seconds: float

    @property
    def sentence(self) -> str:
        """The last line in which Plait says why it ended; empty if there is none."""
        said = [line for line in self.text.splitlines() if line.startswith("plait: ")]
        return said[-1] if said else ""


@attrs.define
class Started:
    """A command that runs in a session of its own."""

    pid: int
    console: Path
    since: float
    _code: int | None = None

    def ended(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code is not None

    def wait(self, seconds: float = SECONDS) -> Ended:
        """Raises TimeoutError, after killing it, if it takes longer."""
        deadline = time.monotonic() + seconds
        while not self.ended():
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"the command did not end within {seconds:.0f} s: {self.text()[-2000:]}")
            time.sleep(0.01)
        assert self._code is not None
        return Ended(self._code, self.text(), time.monotonic() - self.since)

    def text(self) -> str:
        return self.console.read_text(errors="replace")

    def signal(self, number: int) -> None:
        if not self.ended():
            os.kill(self.pid, number)


@attrs.define
class Sandbox:
    """The folders of one scenario. `work`: where the command runs. Temporary files, HOME and cache are its own.

    cold: each start is a new interpreter.
    """

    root: Path
    layout: str
    text: Path
    cache: Path | None = None
    cold: bool = False
    starts: int = 0
    env: dict[str, str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for folder in (self.work, self.tmp, self.home):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def run_folder(self) -> Path:
        return self.work / "runs" / "a"

    @classmethod
    def attach(cls, root: Path) -> "Sandbox":
        """To look for what runs in a place."""
        place = object.__new__(cls)
        place.root = root
        return place

    def environment(self, fault: Mapping[str, Any] | None = None) -> dict[str, str]:
        env = {k: os.environ[k] for k in ("PATH", "LANG", "VIRTUAL_ENV", "PYTHONPATH") if k in os.environ}
        env |= {"OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}  # bitwise equal wherever memory lies
        env |= {"HOME": str(self.home), "TMPDIR": str(self.tmp), "PYTHONDONTWRITEBYTECODE": "1"}
        env["TORCHINDUCTOR_CACHE_DIR"] = str(self.root / "inductor")  # torch makes it at import, and keeps it
        env |= {"PLAIT_CACHE": str(self.cache or self.root / "cache"), "PLAIT_FAULTS_PLACE": str(self.root), **self.env}
        if fault is not None:
            env["PLAIT_FAULT"] = json.dumps({"once": str(self.root / "once"), "nth": 1, **fault})
            inject = str(Path(sitecustomize.__file__).parent)
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [inject, env.get("PYTHONPATH")]))
        return env

    def arguments(self, *overrides: str) -> list[str]:
        data = ("data=text", f"data.path={self.text}", "data.validation_fraction=0.1")
        return ["train", *MODEL, *LAYOUTS[self.layout], *data, *overrides]

    def start(self, *overrides: str, fault: Mapping[str, Any] | None = None, cold: bool = False) -> Started:
        """`plait train` with these overrides. It is a fork of this process, which has imported all that it needs;
        with `cold`, a new interpreter, as a user's is. `fault`: see inject/sitecustomize.py."""
        return self.command(self.arguments(*overrides), fault=fault, cold=cold)

    def command(self, argv: list[str], fault: Mapping[str, Any] | None = None, cold: bool = False) -> Started:
        self.starts += 1
        console = self.root / f"console-{self.starts}"
        env, since = self.environment(fault), time.monotonic()
        if cold or self.cold:
            with console.open("wb") as out:
                process = subprocess.Popen(
                    [sys.executable, "-m", "plait", *argv],
                    cwd=self.work,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=dies_with_parent,
                )
            process.returncode = 0  # `Started` waits for it
            return Started(process.pid, console, since)
        pid = os.fork()
        if pid == 0:
            file = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            fault_in_env = functools.partial(sitecustomize.install, env.get("PLAIT_FAULT"))
            be_plait(argv, self.work, env, file, file, fault_in_env)
        return Started(pid, console, since)

    def run(self, *overrides: str, seconds: float = SECONDS, **options: Any) -> Ended:
        return self.start(*overrides, **options).wait(seconds)

    def processes(self) -> list[int]:
        """Everything alive that this place's commands started, whoever its parent is now."""
        mark, found = f"PLAIT_FAULTS_PLACE={self.root}".encode(), []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                with contextlib.suppress(OSError):
                    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                    if state in "ZX" or parent == KERNEL_THREADS:
                        continue
                    if (  # a fork's environment is not seen from outside
                        os.readlink(folder / "cwd").startswith(str(self.work))
                        or mark in environment_of(folder).split(b"\0")
                    ):
                        found.append(int(folder.name))
        return found

    def ranks(self) -> list[int]:
        """The live processes of ranks."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("plait rank"):
                    found.append(pid)
        return sorted(found)


def environment_of(folder: Path) -> bytes:
    """The environment of the process of `folder` in /proc, variables apart by a zero byte.

    The kernel sets it last in an exec, after the parent was told that the exec succeeded.
    """
    for _ in range(100):
        if text := (folder / "environ").read_bytes():
            return text
        time.sleep(0.001)
    return b""


def digests(folder: Path) -> dict[str, str]:
    """Path below `folder` -> digest of the file, or the target of a link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
