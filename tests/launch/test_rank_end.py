"""Which of several ends of ranks is the cause, by table, and what a rank says of its own; no torch."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plait.contract.errors import PlaitError
from plait.launch.no_restart import RunFailed
from plait.launch.rank_end import HUNG, PEERS_SECONDS, RankEnd, first_cause, location_of, of_error, of_exit, read, write


def failed(rank, time):
    return RankEnd(rank, "failed", f"ValueError of {rank}", time)


def lost(rank, time):
    return RankEnd(rank, "lost", "lost another rank", time)


def killed(rank, time, number=signal.SIGKILL):
    return of_exit(rank, -number, time)


def hung(rank, time, **groups):
    return RankEnd(rank, "hung", f"hung {rank}", time, groups=groups)


CASES = {
    "one alone": ([lost(0, 5)], 0),
    "its own error beats a lost peer that was noticed before": ([lost(0, 5.0), failed(1, 5.2)], 1),
    "the first of two errors": ([failed(0, 7.0), failed(1, 5.0)], 1),
    "of equal errors the lowest rank": ([failed(2, 5.0), failed(1, 5.0)], 1),
    "a kill beats what an error said within the same moment": ([failed(0, 5.0), killed(1, 5.2)], 1),
    "an error beats a later kill": ([killed(0, 8.0), failed(1, 5.0)], 1),
    "SIGTERM is never a cause": ([killed(0, 4.0, signal.SIGTERM), failed(1, 5.0)], 1),
    "SIGTERM is no cause beside a lost peer": ([killed(0, 4.0, signal.SIGTERM), lost(1, 5.0)], 1),
    "SIGTERM alone": ([killed(0, 4.0, signal.SIGTERM), killed(1, 5.0, signal.SIGTERM)], 0),
    "SIGKILL, because it did not answer": ([killed(0, 5.0 + PEERS_SECONDS), lost(1, 5.0)], 1),
    "SIGKILL by hand": ([killed(0, 5.1), lost(1, 5.0)], 0),
    "an abort at the end of a rank that lost another": ([of_exit(0, -signal.SIGABRT, 5.2), failed(1, 5.0)], 1),
    "an abort of its own": ([of_exit(0, -signal.SIGABRT, 5.0), lost(1, 5.2)], 0),
    "os._exit": ([of_exit(0, 5, 5.1), lost(1, 5.0)], 0),
    "a hang: who waits for nobody": ([hung(0, 9.0, a=(26, True)), hung(1, 9.1, a=(25, False))], 1),
    "a hang: who lags behind": ([hung(0, 9.0, a=(7, True)), hung(1, 9.1, a=(5, True)), hung(2, 9.2, a=(7, True))], 1),
    "a hang: who lags behind in one of two groups": (
        [hung(0, 9.0, a=(4, True), b=(9, True)), hung(1, 9.1, b=(8, True)), hung(2, 9.1, a=(4, False), b=(9, True))],
        1,
    ),
    "a hang: who does not answer": ([hung(0, 9.0, a=(7, True)), killed(1, 9.0 + PEERS_SECONDS)], 1),
    "a hang: who held Python's lock": ([hung(0, 9.0, a=(7, True)), of_exit(1, 1, 9.0, "\nTimeout (0:00:10)!\n")], 1),
    "a hang of one rank": ([hung(0, 9.0)], 0),
    "an error while others hang": ([hung(0, 9.0, a=(7, True)), failed(1, 4.0)], 1),
    "an error after a hang was noticed": ([hung(0, 9.0, a=(7, False)), failed(1, 9.3)], 0),
}


@pytest.mark.parametrize(("ends", "rank"), CASES.values(), ids=CASES)
def test_the_first_cause(ends, rank):
    assert first_cause(ends).rank == rank
    assert first_cause(ends[::-1]).rank == rank


def test_clocks_of_machines_differ():
    """Rank 1 was killed here, where the clock is an hour ahead of that of rank 0's machine."""
    ends = [lost(0, 5.0), killed(1, 3605.0), killed(2, 3605.0 + PEERS_SECONDS)]
    assert first_cause(ends, here=[1, 2]).rank == 1


def test_the_sentence_names_the_rank_and_its_log():
    assert (
        first_cause([failed(0, 12.0), failed(1, 10.0)]).sentence(Path("log"))
        == "ValueError of 1 (rank 1; its log: log)"
    )


def test_hangs_say_what_they_know():
    waiting = [hung(rank, 9.0 + rank, a=(7, True)) for rank in range(2)]
    cause = first_cause(waiting)
    assert (cause.rank, cause.reason) == (0, "hung 0; all ranks wait in the same collective")
    silent = first_cause([waiting[0], killed(1, 9.0 + PEERS_SECONDS)])
    assert (silent.kind, silent.reason) == ("hung", "hung: it did not answer, while the others waited for it")


SEGV = """Fatal Python error: Segmentation fault

Current thread 0x00007fbc9d5296c0 (most recent call first):
  File "/usr/lib/site-packages/torch/nn/functional.py", line 44 in call
  File "/home/me/model.py", line 7 in forward
  File "<frozen runpy>", line 88 in _run_code

Extension modules: a, b
"""
ABORT = """terminate called after throwing an instance of 'gloo::IoException'
  what():  [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8576
"""
TRACE = """Traceback (most recent call last):
  File "<string>", line 1, in <module>
ImportError: cannot import name 'Random' from 'random' (/here/random.py)
"""
DEATHS = {
    (-9, "", "", False): ("killed", "was killed by SIGKILL", False),
    (-9, "", "", True): ("killed", "was killed by SIGKILL: memory ran out", True),
    (-11, SEGV, "", False): ("killed", "was killed by SIGSEGV in forward (me/model.py, line 7)", False),
    (-11, "", "", False): ("killed", "was killed by SIGSEGV", False),
    (-60, "", "", False): ("killed", "was killed by signal 60", False),
    (-6, "terminate called without an active exception\n", "", False): ("aborted", "was killed by SIGABRT", False),
    (-15, "", "", False): ("stopped", "was killed by SIGTERM", False),
    (130, "", "", False): ("stopped", "was stopped by SIGINT", False),
    (HUNG, "", "", False): ("hung", "made no progress", False),
    (5, "a line\n", "", False): ("exited", "ended itself with exit code 5, by os._exit or the like", True),
    (1, "", TRACE, False): ("failed", TRACE.splitlines()[-1], True),
    (1, "", "", False): ("exited", "ended itself with exit code 1, by os._exit or the like", True),
}


@pytest.mark.parametrize(("given", "told"), DEATHS.items())
def test_a_rank_that_left_no_word(given, told):
    code, words, early, memory = given
    end = of_exit(3, code, 1.0, words, early, memory)
    assert (end.kind, end.reason, end.repeats) == told
    assert (end.rank, end.time) == (3, 1.0)


HELD = 'Timeout (0:00:10)!\nThread 0x1 (most recent call first):\n  File "/home/me/model.py", line 7 in forward\n'
NCCL = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  NCCL"
ASSERTED = f"{NCCL} watchdog: CUDA error: device-side assert triggered, aborting\n"
WORDS = {  # exit code, last words -> kind, fault, what is told
    (-6, ABORT): ("lost", None, "was killed by SIGABRT: gloo::IoException: [/gloo/"),
    (1, f"an earlier line\n{HELD}"): ("hung", None, "and held Python's lock in forward (me/model.py, line 7)"),
    (-6, ASSERTED): ("aborted", "device", ""),
    (-6, f"{NCCL}: out of memory; connection closed\n"): ("aborted", "memory", ""),
    (-6, f"{NCCL}: connection closed by peer\n"): ("lost", None, ""),
}


@pytest.mark.parametrize(("given", "told"), WORDS.items())
def test_the_last_words_tell_what_a_rank_met(given, told):
    end = of_exit(0, given[0], 1.0, given[1])
    assert (end.kind, end.fault) == told[:2]
    assert told[2] in end.reason
    assert end.repeats == (end.fault is not None)


class DistNetworkError(RuntimeError):
    """By this name torch has one."""


class OutOfMemoryError(RuntimeError):
    """By this name torch has one."""


class InductorError(RuntimeError):
    __module__ = "torch._inductor.exc"


PEER = RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8576.")


def caused(error, cause):
    error.__cause__ = cause
    return error


def in_context(error, context):
    error.__context__ = context
    return error


class CheckpointException(BaseException):
    def __init__(self):
        super().__init__()
        self.failures = {0: (PEER, None)}


ERRORS = [
    (PEER, "lost", False),
    (DistNetworkError("Connection reset by peer"), "lost", False),
    (DistNetworkError("failed to recv, got 0 bytes, the socket is closed"), "lost", False),
    (caused(PlaitError("the checkpoint of step 5 could not be saved: closed by peer"), PEER), "lost", False),
    (in_context(KeyError("x"), PEER), "lost", False),
    (caused(PlaitError("cannot be saved"), CheckpointException()), "lost", False),
    (ValueError("the peer of gloo closed its connection"), "failed", True),
    (RuntimeError("could not restore: connection of shapes"), "failed", True),
    (PlaitError("the loss of step 3 is nan"), "failed", True),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), "failed", False),
    (RuntimeError("CUDA error: device-side assert triggered"), "failed", True),
    (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"), "failed", True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), "failed", True),
    (MemoryError(), "failed", True),
    (InductorError("no CUDA kernel of that shape"), "failed", True),
    (InductorError("C++ compile error: tl.store(...) // abort() if the connection is closed"), "failed", True),
    (
        RuntimeError("NCCL error, ncclUnhandledCudaError: connection aborted: device-side assert triggered"),
        "failed",
        True,
    ),
    (ConnectionResetError("while reading the data"), "failed", False),
    (OSError(28, "No space left on device"), "failed", True),
    (RecursionError("maximum recursion depth exceeded"), "failed", True),
    (SystemExit(3), "failed", True),
]


@pytest.mark.parametrize(("error", "kind", "repeats"), ERRORS, ids=lambda e: repr(e)[:50])
def test_what_an_error_means(error, kind, repeats):
    end = of_error(error, 1, 2.0)
    assert (end.kind, end.repeats, end.rank, end.time) == (kind, repeats, 1, 2.0)


GLOO = (
    "[/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.77.0.11]:2345. This may mean that"
)
LOST = [  # what torch says, and what the user reads
    (
        RuntimeError(f"{GLOO} a remote process is unhealthy.\nGLHF! \U0001f3d6"),
        "Connection closed by peer [10.77.0.11]:2345",
    ),
    (RuntimeError("[../gloo/pair.cc:534] Connection closed by peer [::1]:7"), "Connection closed by peer [::1]:7"),
    (RuntimeError("Gloo failed with [/a/b.cc:144] timed out. remote=[127.0.1.1]"), "Gloo failed with timed out"),
    (caused(PlaitError("it was not saved"), PEER), "Connection closed by peer [127.0.0.1]:8576"),
]


@pytest.mark.parametrize(("error", "reads"), LOST)
def test_a_lost_rank_is_told_without_places_in_torch(error, reads):
    assert of_error(error, 0, 1.0).reason == f"lost another rank: {reads}"


FAULTS = [
    (MemoryError(), "memory", "remat.mode=full"),
    (ERRORS[11][0], "memory", "CUDA out of memory. Tried to allocate 2.00 GiB.: use a smaller "),
    (RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might"), "device", "model.vocab_size"),
    (caused(PlaitError("it failed"), InductorError("no\nsuch kernel")), "compiler", "compile.enabled=false"),
    (PEER, None, "lost another rank"),
    (ValueError("the compiler is out of memory"), None, "ValueError"),
]


@pytest.mark.parametrize(("error", "fault", "says"), FAULTS, ids=lambda e: repr(e)[:40])
def test_a_fault_that_no_restart_mends_has_a_name_and_an_exit_code(error, fault, says):
    end = of_error(error, 0, 1.0)
    assert end.fault == fault
    assert says in end.reason
    assert "\n" not in end.reason
    assert RunFailed("why", end.fault).exit_code == {"memory": 4, "device": 5, "compiler": 6, None: 1}[fault]


def test_the_kernel_kills_for_want_of_memory():
    assert of_exit(0, -signal.SIGKILL, 1.0, out_of_memory=True).fault == "memory"
    assert of_exit(0, -signal.SIGKILL, 1.0).fault is None


def leave():
    sys.exit(3)


def test_who_called_exit():
    with pytest.raises(SystemExit) as raised:
        leave()
    reason = of_error(raised.value, 0, 1.0).reason
    assert reason.startswith("sys.exit(3) was called in leave (launch/test_rank_end.py, line ")


def test_where_a_thread_is():
    assert location_of(sys._getframe()).startswith(" in test_where_a_thread_is (launch/test_rank_end.py, line ")
    assert location_of(None) == ""


def test_a_word_survives_where_the_run_cannot_be_written(tmp_path):
    end = hung(2, 1.5, a=(3, True))
    write(end, tmp_path / "nowhere", tmp_path)
    write(failed(1, 2.0), tmp_path)
    (tmp_path / "rank-4.end.json").write_text("{")
    assert read(tmp_path / "nowhere", tmp_path) == {2: end, 1: failed(1, 2.0)}
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank-{rank}.end.json" for rank in (1, 2, 4)]


EXITS = """
import os, sys
from pathlib import Path
from plait.launch import rank
from plait.records.run_folder import RunFolder

rank._train = lambda *given: os._exit(7)
rank.run_rank(RunFolder(Path(sys.argv[1])))
"""


def test_a_rank_that_ends_itself_leaves_word_that_it_would_do_so_again(tmp_path):
    done = subprocess.run([sys.executable, "-c", EXITS, tmp_path], env={**os.environ, "RANK": "2"}, check=False)
    assert done.returncode == 7
    (end,) = read(tmp_path / "ranks").values()
    assert (end.rank, end.kind, end.repeats) == (2, "exited", True)
    assert end.reason.startswith("ended itself by os._exit(7) in <lambda> (")
