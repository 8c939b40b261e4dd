"""A rank that compiles does not hang, and no more does a rank that waits for it."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from plait.launch.compiling import Compiling
from plait.launch.rank_end import HUNG

RANK = """
import datetime, logging, os, sys, time
import torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from plait.launch import compiling, watchdog
from plait.parallel.process_group import set_timeout

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
logging.basicConfig(filename=folder / f"log-{rank}", level=logging.INFO, encoding="utf-8")
TIMEOUT = 2.0
compiling.LINE_SECONDS = 1.5 * TIMEOUT
watchdog.LINGER_SECONDS = 0.1
store = dist.FileStore(str(folder / "store"), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=TIMEOUT))
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
set_timeout(60)

def compiles(graph, inputs):
    # Beyond the timeout: until this rank's watchdog has said so, which it does after `LINE_SECONDS`.
    while watchdog.COMPILE_TIMEOUTS == 2 or "has compiled a graph" not in (folder / "log-1").read_text("utf-8"):
        time.sleep(0.05)
    return graph

def say(text):
    (folder / f"said-{rank}").write_text(text, encoding="utf-8")

double, thrice = (torch.compile(lambda x, n=n: n * x, backend=compiles) for n in (2, 3))
dist.barrier()
with watchdog.Watchdog(TIMEOUT, say=say) as dog:
    for watchdog.COMPILE_TIMEOUTS, function in (60, double), (2, thrice):
        dog.doing("a step")
        value = function(torch.ones(3)) if rank else 2 * torch.ones(3)
        dist.all_reduce(value, group=mesh.get_group())
        dist.all_reduce(value)
        print(value.tolist(), flush=True)
"""


@pytest.mark.slow
def test_a_graph_may_compile_for_longer_than_the_timeout_but_not_without_end(tmp_path: Path) -> None:
    """Rank 1 compiles a graph in each of two steps, which rank 0 waits for; the second never ends."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path)],
            env={**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [out for out, _ in said] == ["[8.0, 8.0, 8.0]\n"] * 2, said
    assert (tmp_path / "said-0").read_text(encoding="utf-8") == "waiting for rank 1, which compiles"
    assert not (tmp_path / "said-1").exists()
    assert ranks[1].returncode == HUNG
    errors = said[1][1]
    assert (waited := re.search(r"rank 1 made no progress for (\d+) s \(.*\) in: a step, whose graph compiles", errors))
    assert int(waited[1]) >= 4  # twice launch.timeout_seconds
    assert "in compiles" in errors


def test_a_rank_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    said, now, store = list[str](), [0.0], HashStore()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    first, second = (Compiling(80.0, said.append) for _ in range(2))
    monkeypatch.setattr(Compiling, "_group_store", lambda it: store)

    def look(rank: int, one: Compiling) -> bool:
        """After as long as a look waits: whether another rank was seen to compile."""
        monkeypatch.setenv("RANK", str(rank))
        now[0] += one.every
        return one.look(silent_since=0.0) == now[0]

    assert [look(0, first), look(0, first)] == [False, False]
    now[0] += 1.0
    first._begins(None)
    first._ends(None)
    look(0, first)  # tells
    assert [look(0, first), look(0, first), said] == [False, False, []]
    second._begins(None)
    look(1, second)
    assert look(0, first)
    assert said == ["waiting for rank 1, which compiles"]


def test_watching_imports_no_compiler() -> None:
    code = "import sys; from plait.launch.watchdog import Watchdog\nwith Watchdog(9): assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
