"""Ranks that fail in every way: the one that failed is told, with its reason and its log, and nothing else."""

import os
import signal
import subprocess

import pytest

from tests.helpers.pretending import RANK, pretend


@pytest.fixture(autouse=True)
def _console(capfd):
    """What ranks and the launcher's libraries say must be in logs."""
    yield
    assert capfd.readouterr() == ("", "")


LINE = RANK.partition("{body}")[0].count("\n") + 2  # the second of a body
WAYS = {
    "raise": ("raise ValueError('planted')", "ValueError: planted (rank 1; its log: {log})", "ValueError: planted"),
    "exit": (
        "sys.exit('planted')",
        "sys.exit('planted') was called in train (<string>, line {line})",
        "SystemExit: planted",
    ),
    "_exit": ("os._exit(5)", "rank 1 ended itself by os._exit(5) in train (<string>, line {line}); its log: {log}", ""),
    "_exit 0": (
        "os._exit(0)",
        "rank 1 ended itself by os._exit(0) in train (<string>, line {line}); its log: {log}",
        "",
    ),
    "_exit of C": (
        "import ctypes; ctypes.CDLL(None)._exit(0)",
        "rank 1 ended itself with exit code 0, by os._exit or the like; its log: {log}",
        "",
    ),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed by SIGKILL; its log: {log}", ""),
    "segv": (
        "import ctypes; ctypes.string_at(0)",
        "rank 1 was killed by SIGSEGV in train (<string>, line {line}); its log: {log}",
        "Fatal Python error: Segmentation fault",
    ),
    "abort": (
        "os.abort()",
        "rank 1 was killed by SIGABRT in train (<string>, line {line}); its log: {log}",
        "Fatal Python error: Aborted",
    ),
}


QUICK = ("raise", "kill", "segv")


@pytest.mark.parametrize(
    ("code", "sentence", "logged"),
    [pytest.param(*way, id=n, marks=[] if n in QUICK else [pytest.mark.slow]) for n, way in WAYS.items()],
)
def test_the_rank_that_failed_is_told(tmp_path, monkeypatch, code, sentence, logged):
    done = pretend(tmp_path, monkeypatch, f"others_go() if number == 0 else here()\n{code}", max_restarts=0)
    log = done.folder.log_of(1)
    assert done.sentence.startswith(sentence.format(log=log, line=LINE)), done
    assert str(log) in done.sentence
    assert logged in done.log(1)
    assert done.folder.outcome().kind == "failed"


def test_nothing_of_a_run_is_left_in_the_environment(tmp_path, monkeypatch):
    """Ranks that something else starts from here would meet in a folder that is gone."""
    before = dict(os.environ)
    pretend(tmp_path, monkeypatch, "pass", nproc=1)
    assert {name for name, value in os.environ.items() if before.get(name) != value} == set()


def test_a_rank_without_peers_that_ends_itself_with_exit_code_0(tmp_path, monkeypatch):
    """No failure for torch elastic; but the run has no outcome. A fork that ends so is nobody's end."""
    body = "if os.fork() == 0: os._exit(0)\nos.wait()\nos._exit(0)"
    done = pretend(tmp_path, monkeypatch, body, nproc=1)
    log = done.folder.log_of(0)
    assert done.sentence == f"rank 0 ended itself by os._exit(0) in train (<string>, line {LINE + 1}); its log: {log}"
    assert done.folder.outcome().kind == "failed"


def test_restarts_name_the_rank_too(tmp_path, monkeypatch):
    """Rank 1 is killed, then rank 0; the third start ends well and leaves nothing of the first two."""
    body = """
if number == count: here(); os.kill(os.getpid(), signal.SIGKILL)
if count < 2: others_go()
if number == 0: folder.set_outcome(Outcome("finished", "trained"))
"""
    done = pretend(tmp_path, monkeypatch, body.replace("number == count", "number != count and count < 2"))
    log = done.folder.log_of
    assert done.said == [
        f"rank 1 was killed by SIGKILL; restarting all (1 of 3); its log: {log(1)}",
        f"rank 0 was killed by SIGKILL; restarting all (2 of 3); its log: {log(0)}",
    ]
    assert done.sentence == "trained"
    assert {path.name for path in done.folder.ranks.iterdir()} == {"rank-0.log", "rank-1.log"}


def test_no_restart_is_left(tmp_path, monkeypatch):
    body = "others_go() if number == 0 else here()\nos.kill(os.getpid(), signal.SIGKILL)"
    done = pretend(tmp_path, monkeypatch, body, max_restarts=1)
    assert [line.partition("; its log")[0] for line in done.said] == [
        "rank 1 was killed by SIGKILL; restarting all (1 of 1)",
        "rank 1 was killed by SIGKILL; no restart left (launch.max_restarts=1)",
    ]


def test_what_would_only_repeat_is_not_tried_again(tmp_path, monkeypatch):
    body = "(folder.path / f'start-{count}-{number}').touch()\nraise MemoryError if number else others_go()"
    done = pretend(tmp_path, monkeypatch, f"here() if number else None\n{body}")
    assert done.said == []
    assert done.sentence.startswith("MemoryError: use a smaller train.local_batch_size")
    assert done.folder.outcome().fault == "memory"
    assert {path.name for path in done.folder.path.glob("start-*")} == {"start-0-0", "start-0-1"}


def test_a_rank_that_dies_before_it_has_a_log(tmp_path, monkeypatch):
    """The last line of what it said is told, and its log has all of it."""
    code = "import nowhere_at_all  # {body}"
    done = pretend(tmp_path, monkeypatch, "", code=code)
    assert done.sentence.startswith("ModuleNotFoundError: No module named 'nowhere_at_all' (rank ")
    assert done.said == []
    rank = int(done.sentence.partition("(rank ")[2][0])  # the other may be ended before it says anything
    assert "Traceback (most recent call last)" in done.log(rank)


def test_a_full_disk_does_not_hide_the_reason(tmp_path, monkeypatch):
    """The run's folder takes no word of the rank; the launcher's own folder does."""
    body = "others_go() if number == 0 else here()\n(folder.path / 'ranks').chmod(0o500)\nraise ValueError('planted')"
    if os.geteuid() == 0:
        body = body.replace("(folder.path / 'ranks').chmod(0o500)", "rank_end.path_of(folder.ranks, 1).mkdir()")
    done = pretend(tmp_path, monkeypatch, body)
    done.folder.ranks.chmod(0o700)
    assert done.sentence.startswith("ValueError: planted (rank 1; ")


def test_modules_of_the_current_folder_hide_nothing(tmp_path, monkeypatch):
    """Ranks find what the user's folder has, but not instead of Python's own, torch or Plait."""
    monkeypatch.chdir(tmp_path)
    for name in ("random", "torch", "plait", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hidden')")
    (tmp_path / "mine.py").write_text("answer = 42")
    body = """
import importlib.util, random, yaml, mine
place = importlib.util.find_spec("torch").origin
folder.set_outcome(Outcome("finished", f"{mine.answer} {Path(place).parent.name}"))
"""
    assert pretend(tmp_path, monkeypatch, body, nproc=1).sentence == "42 torch"


def test_no_process_of_a_rank_is_left(tmp_path, monkeypatch):
    """A rank that fails takes what it started with it, by its own session, when the others are stopped."""
    body = "others_go() if number == 0 else here()\nos.kill(os.getpid(), signal.SIGKILL)"
    pretend(tmp_path, monkeypatch, body, max_restarts=0)
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout
    assert left == ""
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
