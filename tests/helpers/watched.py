"""What the processes of a command have open, looked at while it runs: sockets and files, in /proc."""

import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs

from tests.helpers.commands import ranks_of

NOTES = """
import os, sys, threading, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._C":  # found only to be imported
            with open(os.environ["NOTES"], "a") as file:
                file.write(f"{os.getpid()}\\n")
sys.meta_path.insert(0, Finder())
events = os.open(os.environ["NOTES"] + ".events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def note(event, args):
    if event == "open":
        if not isinstance(args[0], str) or args[2] & (os.O_WRONLY | os.O_RDWR):
            return
    elif event not in ("began", "import", "os.fork", "os.exec", "os.posix_spawn", "os.system", "subprocess.Popen"):
        return
    os.write(events, f"{time.time_ns()} {os.getpid()} {event} {args[0] if args else None}\\n".encode())
note("began", ())
sys.addaudithook(note)
"""

LISTENING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # the state in /proc/net; 07: not connected


def tree(root: int) -> list[int]:
    """The live processes that `root` started, directly or not, and itself."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append(int(path.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def noting(folder: Path) -> dict[str, str]:
    """The environment of a run whose processes note in `folder` where they import torch."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NOTES)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "NOTES": str(folder / "notes")}


@attrs.frozen
class Event:
    """What a process of Python did: "began", "import" of a module, "open" of a file to read, or an audit event that
    starts a process."""

    time_ns: int
    pid: int
    kind: str
    what: str


def events(folder: Path) -> list[Event]:
    lines = (folder / "notes.events").read_text().splitlines()
    found = [line.split(" ", 3) for line in lines]
    return [Event(int(at), int(pid), kind, what) for at, pid, kind, what in found]


def importers(folder: Path) -> list[str]:
    return (folder / "notes").read_text().split()


def open_files(pid: int) -> set[str]:
    try:
        return {os.readlink(handle) for handle in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return set()


def listening(pid: int) -> Iterator[tuple[str, str]]:
    """(protocol, address in hexadecimal) of every socket of `pid` that takes what others send."""
    inodes = {name[len("socket:[") : -1] for name in open_files(pid) if name.startswith("socket:[")}
    for protocol, state in LISTENING.items():
        table = Path(f"/proc/{pid}/net/{protocol}")
        for line in table.read_text().splitlines()[1:] if inodes and table.exists() else ():
            fields = line.split()
            if fields[3] == state and fields[9] in inodes:
                yield protocol, fields[1].partition(":")[0]


def is_loopback(address: str) -> bool:
    """The kernel writes an address as words of 4 bytes, the last byte of each first."""
    words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
    whole = b"".join(words)
    if len(whole) == 16 and whole[:12] == b"\0" * 10 + b"\xff\xff":
        whole = whole[12:]
    return whole[0] == 127 if len(whole) == 4 else whole == b"\0" * 15 + b"\1"


@attrs.frozen
class Seen:
    """What a command's processes had open, each more than twice: (pid, protocol, address), (pid, file)."""

    sockets: set[tuple[int, str, str]]
    files: set[tuple[int, str]]
    ranks: set[int]
    output: str
    code: int

    def beyond_loopback(self, *apart: int) -> list[tuple[int, str, str]]:
        return sorted(s for s in self.sockets if not is_loopback(s[2]) and s[0] not in apart)


def watch(process: "subprocess.Popen[str]", folder: Path) -> Seen:
    listened, opened, ranks = Counter[tuple[int, str, str]](), Counter[tuple[int, str]](), set[int]()
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        for pid in tree(process.pid):
            listened.update({(pid, *found) for found in listening(pid)})
            opened.update((pid, name) for name in open_files(pid))
        ranks |= set(ranks_of(folder))
        time.sleep(0.1)
    # a child has those of its parent until it begins its program
    sockets, files = ({held for held, n in counted.items() if n > 2} for counted in (listened, opened))
    return Seen(sockets, files, ranks, process.communicate(timeout=5)[0], process.returncode)
