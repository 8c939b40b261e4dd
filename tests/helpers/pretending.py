"""The launcher with ranks that only pretend: real processes under the real agent, without torch, in half a second."""

import textwrap
from pathlib import Path
from typing import Any

import attrs
import pytest

from plait.contract.config import Config, Launch
from plait.contract.errors import PlaitError
from plait.launch.launcher import start_ranks
from plait.records.run_folder import Outcome, RunFolder
from plait.system.signals import untouched

RANK = """
import os, signal, sys, time
from pathlib import Path
from plait.launch import rank_end
from plait.launch import rank
from plait.records.run_folder import Outcome

def others_go():
    '''Wait until the other rank is gone, and fail as torch does then.'''
    ready = folder.path / f"ready-{{count}}"
    (folder.path / f"waits-{{count}}").touch()
    while not ready.exists(): time.sleep(0.01)
    pid = int(ready.read_text())
    stat = Path(f"/proc/{{pid}}/stat")
    while stat.exists() and " Z " not in stat.read_text(): time.sleep(0.01)
    raise RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")

def here():
    '''Let the other rank wait for this one.'''
    (folder.path / ".ready").write_text(str(os.getpid()))
    (folder.path / ".ready").rename(folder.path / f"ready-{{count}}")
    while not (folder.path / f"waits-{{count}}").exists(): time.sleep(0.01)

def both():
    '''Wait until both ranks are here.'''
    (folder.path / f"both-{{count}}-{{os.environ['RANK']}}").touch()
    while len(list(folder.path.glob(f"both-{{count}}-*"))) < 2: time.sleep(0.01)

def train(run, number, file, ended, assembly):
    global folder, count
    folder, count = run, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
{body}
    return Outcome("finished", "trained")

rank._train = train
rank.main()
"""


@attrs.frozen
class Pretence:
    """How it ended. said: what the launcher told on the way. sentence: of the error, else of the outcome."""

    said: list[str]
    sentence: str
    folder: RunFolder
    outcome: Outcome | None

    def log(self, rank: int) -> str:
        return self.folder.log_of(rank).read_text()


def pretend(
    path: Path, monkeypatch: pytest.MonkeyPatch, body: str, nproc: int = 2, code: str = RANK, **launch: Any
) -> Pretence:
    """Run `body` in `nproc` ranks of a run in `path`; `number` is the rank, `count` how often they were restarted."""
    monkeypatch.setattr("plait.launch.launcher.RANK", ("-P", "-c", code.format(body=textwrap.indent(body, "    "))))
    folder, said = RunFolder(path / "run"), []
    folder.lock()
    outcome = None
    try:
        with untouched():
            outcome = start_ranks(Config(launch=Launch(**launch)), folder, nproc, said.append)
        sentence = outcome.reason
    except PlaitError as error:
        sentence = str(error)
    folder.unlock()
    return Pretence(said, sentence, folder, outcome)
