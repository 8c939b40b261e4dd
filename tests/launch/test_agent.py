"""What the agent of a machine does to ranks."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.launch import agent
from plait.launch.agent import Agent, ProcessExits, _Rank
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


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux tells of the end of a process")
def test_the_agent_sleeps_until_a_rank_ends() -> None:
    living = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    ends = ProcessExits(each.pid for each in living)
    woken = threading.Event()
    waiting = threading.Thread(target=lambda: (ends.wait(600), woken.set()))
    waiting.start()
    assert not woken.wait(0.1)
    living[1].communicate(b"\n")
    waiting.join(60)
    assert woken.is_set()
    living[0].communicate(b"\n")
    ends.close()
    ends.wait(600)  # knows of none


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


@pytest.mark.parametrize("lost", [None, "beta has not answered for 5 s"])
def test_ranks_that_make_room_do_not_wait_for_a_machine_that_is_lost_meanwhile(lost):
    """A machine has come, so ranks finish their step; a machine that loses its power now takes no more part in it."""
    killed, asked, sent = threading.Event(), [], []

    def close(number, timeout):
        asked.append((number, timeout))
        assert killed.wait(60) or lost is None

    one: Any = Agent.__new__(Agent)
    one._pcontext, one.grace_seconds = SimpleNamespace(close=close), 30.0
    one._send = lambda number: (sent.append(number), killed.set())
    ends = iter([None, None])

    def losing():
        if lost is None:
            killed.set()  # the ranks end by themselves
        return next(ends, lost)

    assert one._make_room(SimpleNamespace(lost=losing)) == lost
    assert asked == [(signal.SIGTERM, 30.0)]
    assert sent == ([signal.SIGKILL] if lost else [])
