"""The machines of a scenario and the launchers on them. As long as one of these waits, somebody must say for what."""

import contextlib
import ctypes
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import attrs

from plait_testing.warm import be_plait, dies_with_parent
from tests.faults.place import Sandbox, Started
from tests.faults.several.run_time import RunTime
from tests.faults.verdict import Defect, quiet
from tests.helpers.machines import Machine, Machines

SILENCE = 10.0  # seconds without a line or a step, in which nobody computes either
TOLD = 35.0  # the same, if the last line of a console says for whom it waits
LOOK = 0.5  # seconds between two looks at what the processes use
WAITS = re.compile(r"waiting for|has not answered|have not answered|is a spare")
HUNG = 300.0  # seconds of the run in which it must get somewhere
LEFT = 5.0  # seconds of the run that its last processes have for ending
SPACES = ("user", "net", "uts", "mnt", "ipc", "pid")
PORT = 29500
NAMES = ("alpha", "beta", "gamma", "delta")


@attrs.define
class Launcher(Started):
    """`plait train` on a machine; this process started another one, outside of the machine, that waits for it."""

    machine: Machine | None = None
    began: float = 0.0  # in seconds of the run
    judged: bool = False
    signalled: bool = False

    def signal(self, number: int) -> None:
        self.signalled = True
        with contextlib.suppress(OSError):
            for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                os.kill(int(pid), number)


@attrs.define
class Cluster:
    """The machines in a scenario's place, with a folder that all see. overrides: of every start.

    Everything that waits calls `until`, which raises Defect for a silence of more than ten seconds. All limits are in
    seconds of the run: RunTime leaves out those in which it had to wait for this machine's processors and disk.
    """

    place: Sandbox
    count: int
    ranks: int
    overrides: tuple[str, ...]
    nnodes: str
    launchers: list[Launcher] = attrs.field(factory=list)
    _machines: Machines | None = None
    _seen: dict[str, int] = attrs.field(factory=dict)
    _time: RunTime = attrs.field(factory=RunTime)
    _looked: float = 0.0
    _news: float = 0.0
    _lost: set[str] = attrs.field(factory=set)

    def __enter__(self) -> "Cluster":
        self._machines = Machines(self.place.root.parent, *NAMES[: self.count])
        self._machines.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._machines is not None
        self._machines.__exit__()
        for launcher in self.launchers:
            with contextlib.suppress(TimeoutError):
                launcher.wait(10)

    def __getitem__(self, name: str) -> Machine:
        assert self._machines is not None
        return self._machines[name]

    def own(self, name: str, what: str) -> Path:
        """A machine's own folder `tmp` or `home`, as it sees it: a disk may be mounted there."""
        return Path(f"/proc/{self[name].pid}/root{self.place.root}/{what}-{name}")

    @property
    def names(self) -> list[str]:
        return list(NAMES[: self.count])

    # --- starts

    def start(
        self, name: str, *overrides: str, prepare: Callable[[], None] = lambda: None, cold: bool = False, **env: str
    ) -> Launcher:
        """The run's command on this machine: a fork of this process, or with `cold` a new interpreter."""
        machine, place = self[name], self.place
        together = (f"launch.nnodes={self.nnodes}", f"launch.nproc_per_node={self.ranks}")
        here = [each for each in place.arguments() if not each.startswith("launch.nproc_per_node=")]
        argv = [*here, *self.overrides, *together, f"launch.rdzv_endpoint=alpha:{PORT}", *overrides]
        place.starts += 1
        console = place.root / f"console-{place.starts}-{name}"
        own = {each: str(place.root / f"{each}-{name}") for each in ("tmp", "home")}
        for folder in own.values():
            Path(folder).mkdir(exist_ok=True)
        environment = {**place.environment(), "TMPDIR": own["tmp"], "HOME": own["home"], **env}
        since = time.monotonic()
        self._lost.discard(name)
        pid = os.fork()
        if pid == 0:
            dies_with_parent()
            file = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            _enter(machine.pid)
            inner = os.fork()  # the first process inside the machine's process tree
            if inner == 0 and cold:
                _be_command(argv, place.work, environment, file)
            if inner == 0:
                be_plait(argv, place.work, environment, file, file, prepare)
            _, status = os.waitpid(inner, 0)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        console.touch()
        self.launchers.append(Launcher(pid, console, since, machine=machine, began=self.seconds))
        return self.launchers[-1]

    def lose(self, name: str, how: str) -> None:
        """how: a method of the machine that ends all its processes."""
        for each in self.live(name):
            each.judged = True
        getattr(self[name], how)()
        self._lost.add(name)

    def start_all(self, *overrides: str) -> list[Launcher]:
        return [self.start(name, *overrides) for name in self.names]

    def live(self, name: str | None = None) -> list[Launcher]:
        return [
            each
            for each in self.launchers
            if not each.ended() and (name is None or (each.machine is not None and each.machine.name == name))
        ]

    def ranks_of(self, name: str) -> list[int]:
        """The processes of ranks on this machine."""
        there = os.readlink(f"/proc/{self[name].pid}/ns/net")
        found = []
        for pid in self.place.ranks():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/net") == there:
                    found.append(pid)
        return found

    # --- waiting

    @property
    def seconds(self) -> float:
        """The time of the run now."""
        self._time.look(self.place.processes())
        self._looked = time.monotonic()
        return self._time.passed

    def until(self, reached: Callable[[], bool], seconds: float = HUNG) -> bool:
        """Whether it was reached before all launchers ended, or `seconds` passed without a line or a step."""
        self._news = self.seconds
        while not reached():
            if not self.live():
                return reached()
            self._listen()
            if self._time.passed > self._news + seconds:
                raise Defect(f"nothing happens for {seconds:g} s:\n{self.text()}")
            time.sleep(0.02)
        return True

    def sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= deadline)

    def row(self, step: int) -> bool:
        """Wait until metrics.jsonl has the row of this step, or a later one."""
        return self.until(lambda: self.last_row() >= step)

    def last_row(self) -> int:
        try:
            lines = (self.place.run_folder / "metrics.jsonl").read_text().splitlines()
            return int(lines[-1].split(",")[0].rpartition(" ")[2]) if lines else 0
        except (OSError, ValueError, IndexError):
            return 0

    def _listen(self) -> None:
        """Note news: a longer console, or metrics.jsonl. Without any, nobody computes while all wait."""
        if (sizes := self._sizes()) != self._seen:
            self._seen, self._news, self._time.idle = sizes, self._time.passed, 0.0
        if time.monotonic() - self._looked < LOOK:
            return
        _ = self.seconds
        if (silent := self._time.idle) > SILENCE and (live := self.live()):
            told = any(WAITS.search((each.text().splitlines() or [""])[-1]) for each in live)
            if (told and silent < TOLD) or self._sizes() != self._seen:  # a line may just have ended a wait
                return
            raise Defect(f"silent for more than {TOLD if told else SILENCE:g} s, without computing:\n{self.text()}")

    def _sizes(self) -> dict[str, int]:
        """Of the consoles and metrics.jsonl, in bytes, by path."""
        sizes = {}
        for path in [*(each.console for each in self.launchers), self.place.run_folder / "metrics.jsonl"]:
            with contextlib.suppress(OSError):
                sizes[str(path)] = path.stat().st_size
        return sizes

    # --- the end

    def judge(self, launcher: Launcher, *codes: int) -> None:
        """An ended launcher, which nobody's crash ended: its code is one of `codes`, and if that is 1 or more without
        a signal, it has said why in one sentence. Raises Defect."""
        launcher.judged = True
        ended = launcher.wait(60)
        quiet(ended)
        if ended.code not in codes:
            raise Defect(f"exit code {ended.code} instead of {codes} on {launcher.machine.name}:\n{self.text()}")
        said = [line for line in ended.text.splitlines() if line.startswith("plait: ")]
        if ended.code == 1 and len(said) != 1:
            raise Defect(f"{len(said)} sentences instead of one on {launcher.machine.name}:\n{self.text()}")

    def clean(self) -> None:
        """Nothing is left over on any machine. Raises Defect."""
        ended = self.seconds
        while (left := self.place.processes()) and self.seconds < ended + LEFT:
            time.sleep(0.05)
        if left:
            raise Defect(f"{len(left)} process(es) left over: {[_named(pid) for pid in left]}")
        for name in self.names:
            if name in self._lost:  # what a lost machine leaves is removed by the next start there
                continue
            for each in ("tmp", "home"):
                folder = self.own(name, each)
                if folder.exists() and (found := sorted(path.name for path in folder.iterdir())):
                    raise Defect(f"left in the {each} folder of {name}: {', '.join(found[:5])}")

    def text(self) -> str:
        """The ends of all consoles."""
        return "\n".join(f"--- {each.console.name}\n{each.text()[-1200:]}" for each in self.launchers)


def _named(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
    return str(pid)


def _be_command(argv: list[str], work: Path, env: dict[str, str], console: int) -> NoReturn:
    os.setsid()
    dies_with_parent()
    os.chdir(work)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, console), (2, console)):
        os.dup2(source, target)
    os.execve(sys.executable, [sys.executable, "-m", "plait", *argv], env)


def _enter(first: int) -> None:
    """Enter the namespaces of the machine with this first process; the next fork is a process of that machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    files = []
    for space in SPACES:
        there, here = f"/proc/{first}/ns/{space}", f"/proc/self/ns/{space}"
        if os.readlink(there) != os.readlink(here):
            files.append(os.open(there, os.O_RDONLY | os.O_CLOEXEC))
    for file in files:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(file)
