"""Whole runs that fail, in each way, on one chosen rank: one sentence names it, and the traceback is in its log."""

import re
import subprocess

import pytest

from tests.helpers.commands import PLAIT, SMALL, TORCHRUN, environment, free_port, train
from tests.helpers.fakes import distribution

CODE = """
import ctypes, os, signal, sys, time
import attrs
from plait import hookimpl

how, rank = os.environ["FAULTY"].split()
chosen = os.environ.get("RANK") == rank
if chosen and how == "import":
    sys.exit("not today")

def spins():
    while True: time.sleep(0.01)

WAYS = {
    "raise": lambda: 1 / 0,
    "parallelize": lambda: 1 / 0,
    "exit": lambda: sys.exit(3),
    "_exit": lambda: os._exit(5),
    "segv": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": spins,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "memory": lambda: bytearray(1 << 60),
}

@attrs.define
class Faulty:
    @hookimpl
    def build_mesh(self):
        return []

    @hookimpl
    def parallelize(self, model):
        if chosen and how == "parallelize": WAYS[how]()
        calls = []
        def count(*_):
            calls.append(0)
            if chosen and len(calls) == 3 and how not in ("parallelize", "exit"): WAYS[how]()
        model.register_forward_pre_hook(count)

    @hookimpl
    def after_step(self, step):
        if chosen and step == 3 and how == "exit": WAYS[how]()
"""
NAMED = r"strategy 'faulty' \(plait-faulty 1\.0\)"
PLACE = r"\(plait_faulty/__init__\.py, line \d+\)"
WAYS = {
    "raise": r"ZeroDivisionError: division by zero",
    "parallelize": rf"ZeroDivisionError: division by zero \(raised by {NAMED} in its hook 'parallelize'\)",
    "exit": rf"{NAMED} calls sys\.exit\(3\) in its hook 'after_step'",
    "import": rf"{NAMED} cannot be imported from plait_faulty:Faulty: it calls sys\.exit\('not today'\)",
    "memory": r"MemoryError: use a smaller train\.local_batch_size, .*",
    "_exit": rf"rank 1 ended itself by os\._exit\(5\) in .* {PLACE}",
    "segv": rf"rank 1 was killed by SIGSEGV in .* {PLACE}",
    "kill": r"rank 1 was killed by SIGKILL",
    "hang": rf"rank 1 made no progress for \d+ s \(launch\.timeout_seconds=8\) in: step 3 in spins {PLACE}",
    "stop": r"rank 1 hung: it did not answer, while the others waited for it",
}
RUN = ("strategy=[fsdp2,faulty]", "train.steps=10", "run.name=a", "launch.timeout_seconds=60")
SOON = "launch.timeout_seconds=8"  # for ranks that hang


@pytest.fixture
def site(tmp_path):
    distribution(tmp_path / "site", "plait-faulty", {"faulty": "Faulty"}, code=CODE)
    return str(tmp_path / "site")


def told(how, log):
    """The whole of stderr: one line."""
    where = rf" \(rank 1; its log: {re.escape(str(log))}\)"
    return f"plait: {WAYS[how]}" + (rf"; its log: {re.escape(str(log))}" if "rank 1" in WAYS[how] else where) + "\n"


@pytest.mark.slow  # tests/launch/test_causes.py has them with ranks that only pretend
@pytest.mark.parametrize("how", WAYS)
def test_the_rank_that_failed_is_told(tmp_path, site, how):
    soon = [SOON] if how in ("hang", "stop") else []
    done = train(*RUN, *soon, "launch.max_restarts=0", cwd=tmp_path, PYTHONPATH=site, FAULTY=f"{how} 1")
    log = tmp_path / "runs" / "a" / "ranks" / "rank-1.log"
    assert done.code == (4 if how == "memory" else 1)
    assert re.fullmatch(told(how, log), done.err), done.err
    assert log.exists()
    assert "Traceback" not in done.out
    if how in ("raise", "hang"):
        assert ("Traceback (most recent call last)" if how == "raise" else "Stacks of all threads") in log.read_text()
        assert "gloo" in log.with_name("rank-0.log").read_text(), "what rank 0 lost is in its log"


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "how"), [(0, "parallelize"), (0, "hang"), (1, "raise")])
def test_under_torchrun_it_is_told_once(tmp_path, site, how, rank):
    soon = [SOON] if how == "hang" else []
    command = [*TORCHRUN, "--nproc-per-node=2", f"--master-port={free_port()}", PLAIT, "train", *SMALL, *RUN, *soon]
    env = environment(PYTHONPATH=site, FAULTY=f"{how} {rank}")
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 1
    own = [line for line in done.stderr.splitlines() if line.startswith("plait: ")]
    assert len(own) == 1, done.stderr
    wanted = f"plait: {WAYS[how]}".replace("rank 1", f"rank {rank}")
    assert re.match(wanted, own[0]), own
    assert f"runs/a/ranks/rank-{rank}.log" in own[0]
