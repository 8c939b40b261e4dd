"""What the agent of a machine does to ranks."""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from plait.launch import agent
from plait.launch.agent import _Rank
from tests.helpers.pretending import pretend


def test_a_fork_that_has_just_ended_can_be_closed(tmp_path: Path) -> None:
    """The fork server has reaped it, so its number is free, and the agent has not heard of it."""
    gone = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    gone.wait()
    forks = SimpleNamespace(fork=lambda arguments, env, files: SimpleNamespace(pid=gone.pid))
    rank = _Rank(
        forks,
        entrypoint="rank",
        args=(),
        env={},
        stdout=None,
        stderr=str(tmp_path / "err"),
        local_rank_id=0,
        numa_options=None,
    )
    rank.close(signal.SIGTERM)
    rank.close(signal.SIGKILL)


BLOCKED = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a rank that waits inside NCCL
both()
if number == 1: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(20)
(folder.path / "outlived").touch()
"""


def test_ranks_that_cannot_answer_are_killed_soon_after_one_has_died(tmp_path, monkeypatch):
    monkeypatch.setattr(agent, "PEERS_SECONDS", 2)  # times of death are whole seconds
    done = pretend(tmp_path, monkeypatch, BLOCKED, max_restarts=0)
    assert done.sentence.startswith("rank 1 was killed by SIGKILL")
    assert not (done.folder.path / "outlived").exists()
