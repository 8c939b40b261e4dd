"""A run's folder: who may use it, how the run was started, and how it ended."""

import contextlib
import json
import os
import re
import shutil
import socket
import sys
from importlib.metadata import version
from pathlib import Path
from signal import SIGTERM
from typing import Any

import attrs
import yaml

from plait import __version__
from plait.contract.errors import PlaitError
from plait.system.disk import place, replace, writing
from plait.system.errors import DiskError
from plait.system.locks import try_lock, unlock

FILES = ("config.yaml", "versions.json", "mesh.json", "outcome.json", "metrics.jsonl", "metrics.old.jsonl")


@attrs.frozen
class Outcome:
    """How a run ended.

    kind: "finished", "stopped" (by a signal, after saving), or "failed". reason: why, as one sentence. step: the last
    one that was done. rank: the one that failed first. signal: the number of the one that asked for the stop, if the
    kind is "stopped". fault: what another start would meet again, if it has an exit code of its own. asked: the
    `train.steps` of a run that ended itself before.
    """

    kind: str
    reason: str
    step: int | None = None
    rank: int | None = None
    signal: int | None = attrs.field(
        default=attrs.Factory(lambda self: int(SIGTERM) if self.kind == "stopped" else None, takes_self=True)
    )
    fault: str | None = None
    asked: int | None = None


def _absolute(path: str | Path) -> Path:
    return Path(path).absolute()


@attrs.define
class RunFolder:
    """What a run has in its folder, `runs/<name>`, or a job's in a sweep's. path: of the folder."""

    path: Path = attrs.field(converter=_absolute)
    _lock: int | None = attrs.field(default=None, init=False)
    _made: bool = attrs.field(default=False, init=False)  # by this process

    @property
    def ranks(self) -> Path:
        return self.path / "ranks"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def log_of(self, rank: int) -> Path:
        """The file with the log of this rank."""
        return self.ranks / f"rank-{rank}.log"

    def checkpoints(self, directory: str) -> Path:
        return place(directory) if "://" in directory else self.path / directory  # an absolute one is used as it is

    def lock(self) -> None:
        """Lock the folder until this process ends; creates it if necessary.

        Raises PlaitError if a live run holds it, or the system refuses it.
        """
        if self._lock is not None:
            return
        _check_links(self.path)
        with writing(self.path, "the run's folder"):
            try:
                self.path.mkdir(parents=True)
                self._made = True
            except FileExistsError:
                self.path.mkdir(exist_ok=True)  # raises if it is a file
            self.ranks.mkdir(exist_ok=True)
            file = self.path / ".lock"
            try:
                self._lock = try_lock(file)
            except DiskError:
                with contextlib.suppress(OSError):  # only what was just created is empty
                    file.unlink()
                    self.ranks.rmdir()
                    self.path.rmdir()
                raise
            if self._lock is None:
                holder = file.read_text(encoding="utf-8").strip() or "another process"
                raise PlaitError(
                    f"the run in {self.path} is already running ({holder}); wait for it or set run.name"
                ).at("run.name", self.path.name, fits="another name")
            self.remove_torn()
        with contextlib.suppress(OSError):  # only for processes that the lock turns away
            os.ftruncate(self._lock, 0)  # with its own handle: on NFS, closing another handle releases the lock
            os.write(self._lock, f"process {os.getpid()}".encode())

    def remove_torn(self) -> None:
        """Remove temporary files of killed processes; nobody else may be writing now."""
        for torn in self.path.glob(".*.[0-9]*"):
            if re.fullmatch(rf"\.({'|'.join(map(re.escape, FILES))})\.\d+", torn.name):
                torn.unlink(missing_ok=True)

    def check(self) -> None:
        """Raises PlaitError if something other than a file has the name of a file that a run writes."""
        for path in (*(self.path / name for name in FILES), *self.ranks.glob("rank-*")):
            if path.exists() and not path.is_file():
                raise PlaitError(f"{path} is not a file: move or remove it, or set another run.name")

    def unlock(self) -> None:
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove a folder that was just created; with its content if this process made it, and holds it."""
        if self._lock is not None and self._made:
            shutil.rmtree(self.path, ignore_errors=True)
        for empty in (self.ranks, self.path):
            with contextlib.suppress(OSError):
                empty.rmdir()

    def write_config(self, config: dict[str, Any]) -> None:
        replace(self.path / "config.yaml", yaml.safe_dump(config, sort_keys=False))

    def read_config(self) -> dict[str, Any]:
        """The config of the run, in plain values. Raises OSError if it has none."""
        return yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))

    def write_mesh(self, mesh: dict[str, Any]) -> None:
        replace(self.path / "mesh.json", json.dumps(mesh, indent=1) + "\n")

    def write_versions(self, versions: dict[str, str]) -> None:
        replace(self.path / "versions.json", json.dumps(versions, indent=2) + "\n")

    def read_versions(self) -> dict[str, str]:
        """Name -> version of what the run was started with. Raises OSError if it has none."""
        return json.loads((self.path / "versions.json").read_text(encoding="utf-8"))

    def set_outcome(self, outcome: Outcome) -> None:
        node = attrs.asdict(
            outcome, filter=lambda field, value: value is not None or field.name not in ("signal", "fault", "asked")
        )
        replace(self.path / "outcome.json", json.dumps(node) + "\n")

    def outcome(self) -> Outcome | None:
        """How the run ended; None if it has not, or ended without reporting why."""
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):  # None for a damaged file
            return Outcome(**json.loads((self.path / "outcome.json").read_text(encoding="utf-8")))
        return None

    def clear_outcome(self) -> None:
        with writing(self.path / "outcome.json"):
            (self.path / "outcome.json").unlink(missing_ok=True)
            self.clear_ends()

    def clear_ends(self) -> None:
        for path in self.ranks.glob("*rank-*.end.json*"):
            path.unlink(missing_ok=True)


def is_live(path: Path) -> bool:
    """Whether a process holds the run, or the sweep, in the folder `path`."""
    for lock in (path / ".lock", path / ".live"):
        if lock.exists():
            handle = try_lock(lock)
            if handle is None:
                return True
            unlock(handle)
    return False


def introduction(pid: int) -> str:
    return f"process {pid} on {socket.gethostname()}\n"


def versions_of(distributions: list[str]) -> dict[str, str]:
    """Versions of Python, Plait, torch and every distribution of a selected plugin."""
    versions = {"python": sys.version.split()[0]}
    versions["plait"] = __version__
    for name in ["torch", *distributions]:
        with contextlib.suppress(ModuleNotFoundError):
            versions[name] = version(name)
    return versions


def _check_links(folder: Path) -> None:
    """Raises PlaitError for a link of another user, who may not decide where a run writes, or a link in `folder` that
    leads out of it.

    The folder itself, and the one that contains it, may be links made by the user or the machine's administrator, for
    example to a larger disk.
    """
    for path in (folder.parent, folder):
        if path.is_symlink() and os.lstat(path).st_uid not in (os.geteuid(), 0):
            raise PlaitError(f"{path} is a symbolic link that another user has made: remove it, or set run.name")
    real = os.path.realpath(folder)
    for at, folders, files in os.walk(folder):
        for path in (Path(at, name) for name in (*folders, *files)):
            if path.is_symlink() and not os.path.realpath(path).startswith(f"{real}{os.sep}"):
                raise PlaitError(
                    f"{path} is a symbolic link that leads out of the run's folder, to {os.readlink(path)}: Plait does "
                    "not write through it; remove it (checkpoint.dir may be an absolute path)"
                )
