"""Handles failures of ranks for the launcher: reports the first cause in one line, and decides whether to restart."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from plait.contract.errors import PlaitError
from plait.launch import spare
from plait.launch.no_restart import RunFailed
from plait.launch.rank_end import STOPPED, RankEnd, first_cause, of_exit, oom_kills, path_of, read
from plait.records.run_folder import Outcome, RunFolder, introduction
from plait.system.scratch import CHECKED

if TYPE_CHECKING:
    from plait.contract.config import Launch
    from plait.launch.agent import Exit

TAIL = 10_000_000  # bytes of a log in which a rank's last words are searched


class Failures:
    """The failures of one run on this machine; `cause` is the last one reported."""

    def __init__(self, folder: RunFolder, launch: "Launch", scratch: Path, say: Callable[[str], None]) -> None:
        self.folder, self.launch, self.scratch, self.say = folder, launch, scratch, say
        self.cause: RankEnd | None = None
        self._deaths = 0
        self.untold = False  # whether the run must end on all machines, and its folder cannot say so
        self._peers_lost = False  # the last restart counts only if the same machines meet again

    def starting(self, ranks: Iterable[int], members_changed: bool = False) -> None:
        """Before ranks start. Raises RunFailed if they must not."""
        if self._peers_lost and not members_changed:
            self._deaths += 1
            if self.cause is not None and self._deaths > self.launch.max_restarts:
                self._is_the_outcome(self.cause)
                raise RunFailed(self.cause.sentence(self.folder.log_of(self.cause.rank)), self.cause.fault)
        self._peers_lost = False
        if members_changed:
            (self.scratch / CHECKED).unlink(missing_ok=True)
        (self.scratch / STOPPED).unlink(missing_ok=True)
        self._ranks, self._oom = list(ranks), oom_kills()
        spare.clear()
        for rank in self._ranks:
            for folder in (self.folder.ranks, self.scratch):
                path_of(folder, rank).unlink(missing_ok=True)

    def failed(self, exits: Mapping[int, "Exit"]) -> bool:
        """All ranks have ended after one failed. Reports which and why; returns whether a restart may help."""
        out_of_memory = oom_kills() > self._oom
        ends = read(self.folder.ranks, self.scratch)
        for rank, gone in exits.items():
            early, words = self._words(rank, gone)
            if rank not in ends:
                ends[rank] = of_exit(rank, gone.code, gone.time, words, early, out_of_memory)
        if all(end.kind in ("lost", "stopped") for end in ends.values()):
            for rank in set(self._ranks) - ends.keys():  # a rank that ended early without a failure
                ends[rank] = of_exit(rank, 0, min(end.time for end in ends.values()))
        self.cause = cause = first_cause(ends.values(), self._ranks)
        if self.launch.elastic and cause.kind == "lost":
            self.say(f"rank {cause.rank} {cause.how}; starting again with the machines that are there")
            self._peers_lost = True
            return True
        self._deaths += 1
        log, most = self.folder.log_of(cause.rank), self.launch.max_restarts
        told = (cause.repeats or self._deaths > most) and self._is_the_outcome(cause)
        if cause.repeats:  # on several machines all ranks start once more, see the outcome, and end everywhere
            self.untold = self.launch.most > 1 and not told
            return self.launch.most > 1 and told and self._deaths <= most
        self.say(f"rank {cause.rank} {cause.how}; {self._then()}; its log: {log}")
        return self._deaths <= most

    def stopped(self) -> bool:
        """Whether ranks that ended well were asked to stop."""
        return (self.scratch / STOPPED).exists()

    def lost(self, sentence: str) -> bool:
        """Ranks must restart because another machine does not answer. Returns whether they may."""
        self.cause = cause = RankEnd(self._ranks[0], "machine", sentence, time.time())
        if self.launch.elastic:
            self._peers_lost = True
            self.say(f"{sentence}; starting again with the machines that are there")
            return True
        self._deaths += 1
        if self._deaths > self.launch.max_restarts:
            self._is_the_outcome(cause)
        self.say(f"{sentence}; {self._then()}")
        return self._deaths <= self.launch.max_restarts

    def _then(self) -> str:
        most = self.launch.max_restarts
        if self._deaths > most:
            return f"no restart left (launch.max_restarts={most})"
        return f"restarting all ({self._deaths} of {most})"

    def silent(self) -> RankEnd | None:
        """All ranks ended with exit code 0, but the run has no outcome: the rank that ended itself, if one reported
        it."""
        ends = read(self.folder.ranks, self.scratch)
        if not ends:
            return None
        cause = first_cause(ends.values())
        self._is_the_outcome(cause)
        return cause

    def _is_the_outcome(self, cause: RankEnd) -> bool:
        """Whether the other machines can read it."""
        with contextlib.suppress(PlaitError):  # a full disk
            self.folder.set_outcome(
                Outcome("failed", cause.sentence(self.folder.log_of(cause.rank)), fault=cause.fault)
            )
            return True
        return False

    def _words(self, rank: int, gone: "Exit") -> tuple[str, str]:
        """The rank's output before it had a log, if it never had one, and its log."""
        log = self.folder.log_of(rank)
        early, written = _tail(Path(gone.stderr)) if gone.stderr else "", _tail(log)
        _, began, words = written.rpartition(introduction(gone.pid))
        if early.strip():
            with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
                file.write(early)
        return ("", words) if began else (early, "")


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        return file.read().decode(errors="replace")
    return ""
