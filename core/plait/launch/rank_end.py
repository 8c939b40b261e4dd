"""How ranks end, and which one ended first for its own reason: the others only lost it, or were stopped."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

from plait.contract.errors import PlaitError
from plait.launch import spare
from plait.launch.no_restart import ADVICE, ASSERT, MEMORY, fault_of
from plait.launch.no_restart import sentence as sentence_of
from plait.system.disk import replace
from plait.system.errors import one_line, refused, visible
from plait.system.signals import ASKING
from plait.system.signals import name as signal_name

HUNG = 70  # the exit code of a rank that its watchdog ended
OWN = ("killed", "failed", "exited", "aborted")  # causes; of causes at nearly the same time the first kind counts
MOMENT = 0.5  # seconds: deaths are noticed late, and clocks of machines differ
STOPPED = "stopped"  # a file in the scratch folder: ranks of this machine were asked to stop, and did
PEERS_SECONDS = 5  # after a rank has died: those that wait for it inside NCCL cannot answer a signal, and are killed
PATIENCE = PEERS_SECONDS - 1  # seconds: who is killed later than that after the first end did not answer

DIST_ERRORS = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
TALK = re.compile(r"\b(gloo|nccl|tcpstore|filestore|socket|store)\b", re.I)
GONE = re.compile(r"connection|closed|reset|broken pipe|timed? ?out|timeout|refused|unreachable|peer|abort", re.I)


@attrs.frozen
class RankEnd:
    """How one rank ended, from its own `ranks/rank-N.end.json`, or from its exit code.

    kind:    "failed" (its own error), "killed" (by a signal), "exited" and "aborted" (it ended itself, by an exit code
             or SIGABRT), "hung", "lost" (another rank was gone), "stopped" (by SIGTERM); "machine": another machine is
             gone, and the reason is the whole sentence.
    reason:  for "failed" the error; for the others what follows "rank N".
    time:    seconds since the epoch.
    repeats: a restart would meet it again.
    groups:  for "hung": process group -> (number of its last collective, whether the rank still waits in it).
    fault:   what would repeat, if the command has an exit code for it (`no_restart.EXIT_CODES`).
    """

    rank: int
    kind: str
    reason: str
    time: float
    repeats: bool = False
    groups: Mapping[str, tuple[int, bool]] = attrs.field(factory=dict)
    fault: str | None = None

    @property
    def how(self) -> str:
        return f"failed: {self.reason}" if self.kind == "failed" else self.reason

    def sentence(self, log: Path) -> str:
        if self.kind == "failed":
            return f"{self.reason} (rank {self.rank}; its log: {log})"
        if self.kind == "machine":
            return self.reason
        return f"rank {self.rank} {self.reason}; its log: {log}"


def first_cause(ends: Iterable[RankEnd], here: Collection[int] | None = None) -> RankEnd:
    """The end that explains the others. `ends`: at least one, one per rank. here: the ranks of this machine, whose
    times one clock measured; default: all."""
    ends = sorted(ends, key=lambda end: (end.time, end.rank))
    own = [end for end in ends if here is None or end.rank in here]
    unanswered = [end for end in own if end.kind == "killed" and end.time > own[0].time + PATIENCE]
    ends = [attrs.evolve(end, kind="stopped") if end in unanswered else end for end in ends]
    own = [end for end in ends if end.kind in OWN]
    hung = [end for end in ends if end.kind == "hung"]
    if own and not (hung and hung[0].time < own[0].time):
        return min((end for end in own if end.time < own[0].time + MOMENT), key=lambda end: OWN.index(end.kind))
    if hung:
        return _hanging(hung, [end for end in ends if end.kind == "stopped"])
    return next((end for end in ends if end.kind == "lost"), ends[0])


def _hanging(hung: list[RankEnd], silent: list[RankEnd]) -> RankEnd:
    """Of ranks that all stopped progressing: the one that did not answer, waits for no other, or lags behind."""
    if silent:
        reason = "hung: it did not answer, while the others waited for it"
        return attrs.evolve(silent[0], kind="hung", reason=reason)
    busy = [end for end in hung if not any(waits for _, waits in end.groups.values())]
    if busy:
        return busy[0]
    behind = [
        min(members, key=lambda member: member[0])
        for group in {group for end in hung for group in end.groups}
        if len(members := [(end.groups[group][0], i) for i, end in enumerate(hung) if group in end.groups]) > 1
        and len({number for number, _ in members}) > 1
    ]
    if behind:
        return hung[min(behind)[1]]
    if len(hung) == 1:
        return hung[0]
    return attrs.evolve(hung[0], reason=f"{hung[0].reason}; all ranks wait in the same collective")


def of_error(error: BaseException, rank: int, when: float) -> RankEnd:
    """The end of a rank that `error` ended."""
    chain = _chain(error)
    if fault := fault_of(chain):
        return RankEnd(rank, "failed", sentence_of(*fault), when, repeats=True, fault=fault[0])
    if gone := next(filter(_peer_is_gone, chain), None):
        return RankEnd(rank, "lost", f"lost another rank: {_in_short(gone)}", when)
    reason = one_line(error)
    if isinstance(error, SystemExit):
        reason = f"sys.exit({error.code!r}) was called{raised_in(error)}"
    repeats = any(map(refused, chain)) or not any(map(_may_pass, chain))
    return RankEnd(rank, "failed", reason, when, repeats=repeats)


def _chain(error: BaseException) -> list[BaseException]:
    errors: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in errors:
        errors += [each, *(inner for inner, _ in getattr(each, "failures", {}).values())]  # torch's CheckpointException
        each = each.__cause__ or each.__context__
    return errors


def _is_dist(error: BaseException) -> bool:
    return bool(DIST_ERRORS & {cls.__name__ for cls in type(error).__mro__})


def _peer_is_gone(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or isinstance(error, PlaitError):
        return False
    text = str(error)
    return bool((_is_dist(error) or TALK.search(text)) and GONE.search(text))


def _in_short(error: BaseException) -> str:
    """The first sentence, without places in torch's own source; the rank's log has all of it."""
    first = re.sub(r"\[[^\]\s]*\.\w+:\d+\]\s*", "", next(iter(str(error).strip().splitlines()), ""))
    return visible(re.split(r"\.(?:\s|$)", first)[0]) or type(error).__name__


def _may_pass(error: BaseException) -> bool:
    """Whether a restart may help: for a fault of a device or of the network, not for a mistake that would repeat."""
    text = str(error).lower()
    if not isinstance(error, RuntimeError | OSError):
        return False
    return _is_dist(error) or isinstance(error, ConnectionError | TimeoutError) or bool(
        TALK.search(text) or re.search(r"\bcuda\b|cudnn|cublas|\bhip\b", text)
    )  # fmt: skip


def of_exit(
    rank: int, code: int, when: float, words: str = "", early: str = "", out_of_memory: bool = False
) -> RankEnd:
    """The end of a rank that reported nothing.

    words: its log. early: its output, if it never had a log. out_of_memory: whether the kernel has meanwhile killed a
    process because memory ran out.
    """
    if code >= 0:
        return _of_code(rank, code, when, words, early)
    number = -code
    reason = f"was killed by {signal_name(number)}"
    if number == signal.SIGTERM:
        return RankEnd(rank, "stopped", reason, when)
    if number == signal.SIGKILL:
        if out_of_memory:
            return RankEnd(rank, "killed", f"{reason}: memory ran out", when, repeats=True, fault="memory")
        return RankEnd(rank, "killed", reason, when)
    if number == signal.SIGABRT:
        thrown = re.search(r"terminate called after throwing an instance of '(.+)'\s+what\(\):\s*(.*)", words)
        what = f"{reason}: {thrown[1]}: {thrown[2]}" if thrown else reason + _crash_location(words)
        for fault, words_of in (("memory", MEMORY), ("device", ASSERT)):
            if thrown and words_of.search(thrown[2]):
                return RankEnd(rank, "aborted", f"{what}: {ADVICE[fault]}", when, repeats=True, fault=fault)
        gone = thrown is not None and TALK.search(thrown[0]) and GONE.search(thrown[0])
        return RankEnd(rank, "lost" if gone else "aborted", what, when)
    return RankEnd(rank, "killed", reason + _crash_location(words), when)


def _of_code(rank: int, code: int, when: float, words: str, early: str) -> RankEnd:
    if code - 128 in ASKING:
        return RankEnd(rank, "stopped", f"was stopped by {signal_name(code - 128)}", when)
    if code == HUNG:
        return RankEnd(rank, "hung", "made no progress", when)
    if re.search(r"^Timeout \(\d+:\d+:\d+", words, re.MULTILINE):  # faulthandler, when no Python thread could run
        location = _stack_location(words, "Timeout (")
        return RankEnd(rank, "hung", f"made no progress, and held Python's lock{location}", when)
    if lines := [line.strip() for line in early.splitlines() if line.strip()]:
        return RankEnd(rank, "failed", lines[-1], when, repeats=True)
    return RankEnd(rank, "exited", f"ended itself with exit code {code}, by os._exit or the like", when, repeats=True)


def _crash_location(words: str) -> str:
    return _stack_location(words, "Current thread ") or _stack_location(words, "Fatal Python error")


def _stack_location(words: str, begins: str) -> str:
    """` in f (file.py, line 3)`, from the last stack that faulthandler wrote after a line with this beginning."""
    _, found, stack = words.rpartition(f"\n{begins}") if not words.startswith(begins) else ("", begins, words)
    lines = stack.splitlines()[1:]
    start = next((i for i, line in enumerate(lines) if line.startswith("  File ")), len(lines))
    stop = next((i for i, line in enumerate(lines) if i > start and not line.startswith("  File ")), len(lines))
    frames = [re.match(r'  File "(.*)", line (\d+) in (.*)', line) for line in lines[start:stop]]
    return _location([(m[1], int(m[2]), m[3]) for m in frames if m]) if found else ""


def location_of(frame: FrameType | None) -> str:
    """` in f (file.py, line 3)`: where a thread is."""
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return _location(frames)


def raised_in(error: BaseException) -> str:
    """The same for where `error` was raised."""
    at, frames = error.__traceback__, []
    while at is not None:
        frames.append((at.tb_frame.f_code.co_filename, at.tb_lineno, at.tb_frame.f_code.co_name))
        at = at.tb_next
    return _location(frames[::-1])


def _location(frames: list[tuple[str, int, str]]) -> str:
    """The innermost frame that is neither Python's own nor torch's, because other code waits inside those."""
    own, torch = os.path.dirname(os.__file__), f"{os.sep}site-packages{os.sep}torch{os.sep}"
    ours = os.path.join("plait", "system", "signals.py")  # a handler that happens to run

    def foreign(file: str) -> bool:
        python = file.startswith(own) and "site-packages" not in file
        return python or torch in file or file.startswith(("<frozen", "<attrs")) or file.endswith(ours)

    if not frames:
        return ""
    file, line, function = next((each for each in frames if not foreign(each[0])), frames[0])
    return f" in {function} ({os.sep.join(file.split(os.sep)[-2:])}, line {line})"


def path_of(ranks: Path, rank: int) -> Path:
    return ranks / f"rank-{rank}.end.json"


def write(end: RankEnd, *folders: Path) -> None:
    """Write `end` to the first writable folder in `folders`, or to the launcher's memory: disks may be full."""
    text = json.dumps(attrs.asdict(end))
    for folder in folders:
        with contextlib.suppress(PlaitError):
            return replace(path_of(folder, end.rank), text + "\n")
    spare.put(text)


def read(*folders: Path) -> dict[int, RankEnd]:
    """Rank -> the end that it wrote; of several folders the first counts."""
    texts = []
    for path in [path for folder in folders for path in folder.glob("rank-*.end.json")]:
        with contextlib.suppress(OSError, ValueError):
            texts.append(path.read_text(encoding="utf-8"))
    ends: dict[int, RankEnd] = {}
    for text in [*texts, *spare.lines()]:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            given: dict[str, Any] = json.loads(text)
            groups = {group: (int(n), bool(waits)) for group, (n, waits) in given.pop("groups").items()}
            end = RankEnd(**given, groups=groups)
            ends.setdefault(end.rank, end)
    return ends


def oom_kills() -> int:
    """How many processes of this container or machine the kernel has killed because memory ran out, as far as known."""
    for file, key in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(file).read_text(encoding="utf-8").splitlines():
                if line.split()[0] == key:
                    return int(line.split()[1])
    return 0
