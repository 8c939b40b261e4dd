"""Machines on one kernel: each is a process in namespaces of its own, with its own network, host name, processes, /tmp,
/dev/shm, /run and /etc/hosts; files elsewhere are shared.

    with Machines(tmp_path, "alpha", "beta") as machines:
        command = machines["alpha"].start("hostname", cwd=tmp_path)
        assert command.code() == 0, command.output

Their links end at a bridge in a namespace of its own: this machine gets no interface, address or route. Needs Linux,
Debian's iproute2 and util-linux, and root or user namespaces; `why_not` says what is missing.
"""

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.commands import PLAIT, environment

OWN = ("run", "dev/shm", "tmp")  # each machine's own folders of the root; the last may hide what made the others
SEEN = [str(Path(each).resolve()) for each in (sys.prefix, sys.base_prefix, Path(__file__).parents[2])]

# Its first process: when it ends, the kernel ends all others of the machine. It ends with the process that holds the
# other end of its input, however that one ends. /proc is still this machine's when it tells its number.
FIRST = r"""
set -e
read -r pid rest < /proc/self/stat
hostname "$NAME"
mount --make-rprivate /
mount -t proc proc /proc
mount --bind "$FILES/hosts" /etc/hosts
for each in $OWN; do
    mkdir -p "$FILES/$each"
    mount -t tmpfs tmpfs "$FILES/$each"
done
printf '%s\n' "$KEPT" | while read -r each; do
    case "$each" in
        /tmp/*|/run/*|/dev/shm/*) mkdir -p "$FILES$each"; mount --rbind "$each" "$FILES$each" ;;
    esac
done
ip link set lo up
for each in $OWN; do mount --rbind "$FILES/$each" "/$each"; done
echo "$pid"
trap '' CHLD
exec cat > /dev/null
"""


class Command:
    """A running command of a machine. lines: (seconds since its start, text)."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        self.lines: list[tuple[float, str]] = []
        self._began, self._news, self._ended = time.monotonic(), threading.Condition(), False
        self._process = subprocess.Popen(
            arguments, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.lines += [(time.monotonic() - self._began, each) for each in re.split(r"[\r\n]+", line) if each]
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    @property
    def output(self) -> str:
        return "".join(f"[{at:6.1f}] {line}\n" for at, line in self.lines)

    def code(self, within: float = 300) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait(within)

    def running(self) -> bool:
        return self._process.poll() is None

    def seen(self, words: str, within: float = 180, count: int = 1) -> float:
        """The seconds at which it printed them for the `count`-th time; waits for it. Raises AssertionError if it ends
        without."""

        def at() -> list[float]:
            return [seconds for seconds, line in self.lines if words in line][count - 1 :]

        with self._news:
            self._news.wait_for(lambda: at() or self._ended, within)
            found = at()
        assert found, f"no {words!r} within {within} s in\n{self.output}"
        return found[0]

    def signal(self, number: int = signal.SIGTERM) -> None:
        """To the command itself: the process that this one started only waits for it."""
        waits = self._process.pid
        for pid in Path(f"/proc/{waits}/task/{waits}/children").read_text(encoding="utf-8").split():
            os.kill(int(pid), number)


class Machine:
    """One machine. address: of its only link, eth0."""

    def __init__(self, machines: "Machines", name: str, number: int) -> None:
        self.name, self.address = name, f"10.77.0.{number}"
        self._machines, self._number, self._files = machines, number, machines.files / name
        self._files.mkdir()
        self.knows({})
        self._process: subprocess.Popen[str] | None = None

    def boot(self) -> None:
        settings = {
            "NAME": self.name,
            "FILES": str(self._files),
            "OWN": " ".join(OWN),
            "KEPT": "\n".join({str(self._machines.shared), *SEEN}),
        }
        spaces = ["--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--kill-child"]
        self._process, self.pid = _first(
            self._machines.inside("unshare", *spaces, "sh", "-c", FIRST), {**os.environ, **settings}
        )
        port = f"port{self._number}"
        self._machines.ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        self._machines.ip("link", "set", port, "master", "switch", "up")
        self.ip("link", "set", "eth0", "up")
        self.ip("address", "add", f"{self.address}/24", "dev", "eth0")

    def knows(self, names: Mapping[str, str]) -> None:
        """Make these, host name -> address, the only names in its /etc/hosts, beside localhost."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        (self._files / "hosts").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def start(self, *command: str, cwd: Path, **env: str) -> Command:
        here = {name: value for name, value in environment(**env).items() if name != "TMPDIR"}
        enter = ["nsenter", "-t", str(self.pid), "-n", "-u", "-m", "-p", "-i"]
        return Command(self._machines.inside(*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *command), here)

    def plait(self, *arguments: str, cwd: Path, **env: str) -> Command:
        return self.start(PLAIT, *arguments, cwd=cwd, **env)

    def run(self, *command: str, cwd: Path = Path("/"), **env: str) -> str:
        """The output of a command that ends well."""
        done = self.start(*command, cwd=cwd, **env)
        assert done.code() == 0, done.output
        return "".join(f"{line}\n" for _, line in done.lines)

    def ip(self, *words: str) -> None:
        """`ip` for its interfaces, addresses and routes."""
        _run(self._machines.inside("nsenter", "-t", str(self.pid), "-n", "ip", *words))

    def cut(self) -> None:
        """Cut its link: no packet comes or goes."""
        self._machines.ip("link", "set", f"port{self._number}", "down")

    def mend(self) -> None:
        self._machines.ip("link", "set", f"port{self._number}", "up")

    def crash(self) -> None:
        """End all its processes; the kernel closes their connections, so others learn of it at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            _end(self._process)
            self._process = None
            with contextlib.suppress(RuntimeError):  # usually the link is gone with the machine
                self._machines.ip("link", "delete", f"port{self._number}")

    def power_off(self) -> None:
        """The same without a last packet."""
        self.cut()
        self.crash()


class Machines:
    """Machines by name; each knows all names. shared: a folder that all see, wherever it lies."""

    def __init__(self, shared: Path, *names: str) -> None:
        self.shared = shared.resolve()
        self.files = Path(tempfile.mkdtemp(prefix="machines-"))
        self._machines = {name: Machine(self, name, number) for number, name in enumerate(names, 10)}
        for machine in self:
            machine.knows({each.name: each.address for each in self})
        self._switch: subprocess.Popen[str] | None = None

    def __getitem__(self, name: str) -> Machine:
        return self._machines[name]

    def __iter__(self):
        return iter(self._machines.values())

    def inside(self, *command: str) -> list[str]:
        """The command with the rights that machines need: an ordinary user has them in a user namespace."""
        if self._user:
            return ["nsenter", "-t", str(self._switch_pid), "--user", "--preserve-credentials", *command]
        return [*command]

    def ip(self, *words: str) -> None:
        """`ip` on the switch."""
        _run(self.inside("nsenter", "-t", str(self._switch_pid), "-n", "ip", *words))

    def __enter__(self) -> "Machines":
        self._user = os.geteuid() != 0
        user = ["--user", "--map-root-user"] if self._user else []
        try:
            first = 'read -r pid rest < /proc/self/stat; echo "$pid"; exec cat > /dev/null'
            self._switch, self._switch_pid = _first(["unshare", *user, "--net", "sh", "-c", first], {**os.environ})
            self.ip("link", "add", "switch", "type", "bridge")
            self.ip("link", "set", "switch", "up")
            for machine in self:
                machine.boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self:
            machine.crash()
        if self._switch is not None:
            _end(self._switch)
        shutil.rmtree(self.files, ignore_errors=True)


@functools.cache
def why_not() -> str | None:
    """Why there can be no such machines here; None if there can."""
    if missing := [each for each in ("ip", "unshare", "nsenter", "mount", "hostname") if shutil.which(each) is None]:
        return f"no machines of namespaces: there is no {', '.join(missing)}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Machines(Path(folder), "probe") as machines:
                machines["probe"].run("true")
        except (OSError, RuntimeError, AssertionError) as error:
            return f"no machines of namespaces: {error}"
    return None


def _first(command: list[str], env: dict[str, str]) -> tuple[subprocess.Popen[str], int]:
    """A first process and its number. Raises RuntimeError if it does not come so far as to tell it."""
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    number = process.stdout.readline()
    if not number:
        raise RuntimeError(f"{command[0]}: {process.communicate()[1].strip()}")
    return process, int(number)


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate()  # it ends when its input does


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
