"""What the agent of a machine does to ranks."""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from plait.launch.agent import _Rank


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
