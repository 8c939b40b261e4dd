"""How ranks start: forked from one process that imports torch while the run is checked."""

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn

from plait.compose.build import _Undrawn
from plait.train.optimizer_options import check_optimizer
from tests.helpers.commands import environment, numbers, plait, ranks_of, rows, start, train, wait_for_step
from tests.helpers.watched import Seen, events, importers, noting

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
FSDP = ["strategy=[fsdp2]", "run.name=a"]

THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"

SOURCE = """
import os, time
from pathlib import Path
from plait_data.stdlib import Stdlib
import torch

def servers():
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in children if b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]

class Watched(Stdlib):
    def check(self, **given):
        super().check(**given)
        (server,) = servers()
        while "libtorch" not in Path(f"/proc/{server}/maps").read_text():
            time.sleep(0.05)
        Path("server").write_text(server)
        if os.environ.get("REFUSE"):
            raise ValueError("it is refused")

    def open(self, **given):
        Path(f"rank-{os.environ['RANK']}").write_text(f"{os.environ['OMP_NUM_THREADS']} {torch.get_num_threads()}")
        return super().open(**given)
"""


@pytest.fixture
def notes(tmp_path: Path) -> dict[str, str]:
    return noting(tmp_path)


def alive(pid: str) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_ranks_import_while_the_run_is_checked_and_nothing_is_left_if_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "watched.py").write_text(SOURCE)
    done = train("data._target_=watched.Watched", *FSDP, cwd=tmp_path, cold=True, REFUSE="1")
    assert (done.code, done.out) == (1, f"check: a, with torch {version('torch')}\n"), done.err
    assert "it is refused" in done.err
    assert not alive((tmp_path / "server").read_text())
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_ranks_have_the_threads_that_they_are_told(tmp_path: Path) -> None:
    """torch has read the environment before the number of ranks is known."""
    (tmp_path / "watched.py").write_text(SOURCE)
    env = {key: value for key, value in environment().items() if key != "OMP_NUM_THREADS"}
    command = [str(Path(sys.executable).with_name("plait")), "train", "data._target_=watched.Watched", "train.steps=1"]
    more = ["model.dim=32", "train.seq_len=32", "launch.device=cpu", "checkpoint.enabled=false", "run.name=a"]
    for name, nproc in (("one", 1), ("two", 2)):
        here = tmp_path / name
        here.mkdir()
        (here / "watched.py").symlink_to(tmp_path / "watched.py")
        strategy = "strategy=[fsdp2]" if nproc > 1 else "strategy=[]"
        subprocess.run([*command, *more, strategy, f"launch.nproc_per_node={nproc}"], cwd=here, env=env, check=True)
        threads = max((os.cpu_count() or 1) // nproc, 1)
        assert [(here / f"rank-{rank}").read_text() for rank in range(nproc)] == [f"{threads} {threads}"] * nproc


def test_torch_is_imported_twice_whatever_ranks_there_are(watched: tuple[Seen, Path, Path]) -> None:
    """By the launcher and by the process that is forked."""
    seen, folder, _ = watched
    found = importers(folder.parents[1])
    assert len(found) == 2
    assert not set(found) & {str(pid) for pid in seen.ranks}


def test_after_its_last_step_a_run_only_saves_exports_and_ends(watched: tuple[Seen, Path, Path]) -> None:
    """No process starts, no tensors are read again, no rank imports parts of torch, and the launcher nothing."""
    seen, folder, _ = watched
    done = (folder / "metrics.jsonl").stat().st_mtime_ns
    late = [event for event in events(folder.parents[1]) if event.time_ns > done]
    assert {event.kind for event in late} == {"import", "open"}
    opened = [Path(event.what) for event in late if event.kind == "open"]
    assert {path.name for path in opened if path.parent.name.startswith("step-")} == {"manifest.json"}
    assert [path.name for path in opened].count("model.safetensors") == 2  # to flush it, and for its digest
    imported = [event for event in late if event.kind == "import"]
    assert [event.what for event in imported if event.what.startswith("torch") or event.pid not in seen.ranks] == []


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["a rank", "what forked them"])
def test_ranks_start_again_without_another_import_if_what_forks_them_is_left(undisturbed, tmp_path, notes, killed):
    """And they end with the process that forked them."""
    process, folder = start(*FSDP, cwd=tmp_path, cold=True, **notes), tmp_path / "runs" / "a"
    wait_for_step(folder, 8, process)
    ranks = ranks_of(folder)
    (server,) = {int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]) for rank in ranks}
    assert server != process.pid
    os.kill(ranks[1] if killed == "a rank" else server, signal.SIGKILL)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert "was killed by SIGKILL; restarting all (1 of 3)" in output
    assert numbers(folder) == numbers(undisturbed)
    assert not any(alive(str(pid)) for pid in ranks)
    if killed == "a rank":
        assert len(importers(tmp_path)) == 2
        assert not set(importers(tmp_path)) & {str(pid) for pid in ranks}


@pytest.mark.slow
def test_a_process_with_threads_is_not_forked(tmp_path: Path, notes) -> None:
    with (tmp_path / "site" / "sitecustomize.py").open("a") as file:
        file.write(THREAD)
    done = train(
        *FSDP, "train.steps=2", "checkpoint.enabled=false", "validation.interval=0", cwd=tmp_path, cold=True, **notes
    )
    assert done.code == 0, done.err
    assert len(rows(tmp_path / "runs" / "a")) == 2
    assert len(importers(tmp_path)) == 4  # the launcher, what cannot be forked, and two ranks


def test_a_killed_launcher_leaves_nothing_while_it_checks(tmp_path: Path) -> None:
    process = start(*FSDP, cwd=tmp_path, cold=True)
    line = process.stdout.readline()
    assert line.startswith("check: a, with torch "), line
    (server,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while alive(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(server)


CHECKED = """
import sys
from plait.host import check
from plait.host import compose
for given in (["model=llama3_debug"], ["model=deepseek_v3_debug", "optimizer=sgd"], ["strategy=[fsdp2]"]):
    check(compose([*given, "launch.device=cpu"]))
from plait.commands.inspect import report
report(compose(["launch.device=cpu"]))
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""


@pytest.mark.slow
def test_checking_and_inspecting_import_no_compiler(tmp_path: Path) -> None:
    """torch imports it to draw values, even into a tensor without any, and to make an optimizer."""
    done = subprocess.run(
        [sys.executable, "-c", CHECKED], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_compiler_that_is_there_stays_told_to_leave_optimizers_alone() -> None:
    before = torch.optim.Optimizer.add_param_group
    check_optimizer({"_target_": "torch.optim.AdamW", "lr": 1e-3}, [torch.zeros(2, 2)])
    assert torch.optim.Optimizer.add_param_group is before


def test_a_model_on_meta_draws_nothing_and_one_with_values_does() -> None:
    with torch.device("meta"), _Undrawn():
        assert nn.Linear(3, 2).weight.is_meta
    with _Undrawn():
        assert nn.Linear(3, 2).weight.abs().sum() > 0
        assert torch.empty(3).normal_().abs().sum() > 0


def test_a_word_comes_before_torch_is_imported(tmp_path: Path, notes) -> None:
    done = plait("train", "model=none", cwd=tmp_path, cold=True, **notes)
    assert done.code == 1
    assert not (tmp_path / "notes").exists()
