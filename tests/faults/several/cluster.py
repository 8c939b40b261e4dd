"""The machines of a scenario and the launchers on them. As long as one of these waits, somebody must say for what."""

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from plait_testing.warm import be_plait, dies_with_parent
from tests.faults.place import Sandbox, Started
from tests.faults.verdict import Defect, left_running, quiet
from tests.helpers.machines import Machine, Machines

SILENCE = 10.0  # seconds without a line or a step, in which nobody computes either
TOLD = 35.0  # the same, if the last line of a console says for whom it waits
WAITS = re.compile(r"waiting for|has not answered|have not answered|is a spare")
HUNG = 300.0  # seconds in which the run must get somewhere
SPACES = ("user", "net", "uts", "mnt", "ipc", "pid")
PORT = 29500
NAMES = ("alpha", "beta", "gamma", "delta")


@attrs.define
class Launcher(Started):
    """`plait train` on a machine; this process started another one, outside of the machine, that waits for it."""

    machine: Machine | None = None
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

    Everything that waits calls `until`, which raises Defect for a silence of more than ten seconds.
    """

    place: Sandbox
    count: int
    ranks: int
    overrides: tuple[str, ...]
    nnodes: str
    launchers: list[Launcher] = attrs.field(factory=list)
    _machines: Machines | None = None
    _seen: dict[str, int] = attrs.field(factory=dict)
    _busy: dict[int, float] = attrs.field(factory=dict)
    _looked: float = 0.0
    _silent: float = 0.0
    _news: float = 0.0

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

    @property
    def names(self) -> list[str]:
        return list(NAMES[: self.count])

    # --- starts

    def start(self, name: str, *overrides: str, prepare: Callable[[], None] = lambda: None, **env: str) -> Launcher:
        """The run's command on this machine, in a fork of this process."""
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
        pid = os.fork()
        if pid == 0:
            dies_with_parent()
            file = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            _enter(machine.pid)
            inner = os.fork()  # the first process inside the machine's process tree
            if inner == 0:
                be_plait(argv, place.work, environment, file, file, prepare)
            _, status = os.waitpid(inner, 0)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        console.touch()
        self.launchers.append(Launcher(pid, console, since, machine=machine))
        return self.launchers[-1]

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

    def until(self, reached: Callable[[], bool], seconds: float = HUNG) -> bool:
        """Whether it was reached before all launchers ended, or `seconds` passed without a line or a step."""
        self._news = time.monotonic()
        while not reached():
            if not self.live():
                return reached()
            self._listen()
            if time.monotonic() > self._news + seconds:
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
        now = time.monotonic()
        paths = [each.console for each in self.launchers] + [self.place.run_folder / "metrics.jsonl"]
        sizes = {}
        for path in paths:
            with contextlib.suppress(OSError):
                sizes[str(path)] = path.stat().st_size
        if sizes != self._seen:
            self._seen, self._news, self._silent = sizes, now, 0.0
        if now - self._looked < 1:
            return
        before, self._busy = self._busy, {pid: _computed(pid) for pid in self.place.processes()}
        gap, self._looked = min(now - self._looked, 2.0), now
        busiest = max((seconds - before.get(pid, seconds) for pid, seconds in self._busy.items()), default=0.0)
        new = bool(self._busy.keys() - before.keys())
        self._silent += 0.0 if new else max(gap - busiest, 0.0)
        if self._silent > SILENCE and (live := self.live()):
            told = any(WAITS.search((each.text().splitlines() or [""])[-1]) for each in live)
            if told and self._silent < TOLD:
                return
            raise Defect(f"silent for more than {TOLD if told else SILENCE:g} s, without computing:\n{self.text()}")

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
        if left := left_running(self.place):
            raise Defect(f"{len(left)} process(es) left over: {[_named(pid) for pid in left]}")
        for name in self.names:
            for each in ("tmp", "home"):
                folder = self.place.root / f"{each}-{name}"
                if folder.exists() and (found := sorted(path.name for path in folder.iterdir())):
                    raise Defect(f"left in the {each} folder of {name}: {', '.join(found[:5])}")

    def text(self) -> str:
        """The ends of all consoles."""
        return "\n".join(f"--- {each.console.name}\n{each.text()[-1200:]}" for each in self.launchers)


def _named(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
    return str(pid)


def _computed(pid: int) -> float:
    """Seconds in which a process has computed, or its first thread waited for a processor."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        waited = Path(f"/proc/{pid}/schedstat").read_text().split()[1]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") + int(waited) / 1e9
    return 0.0


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
