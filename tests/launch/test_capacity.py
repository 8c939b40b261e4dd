"""What a run needs of its machine: ranks that fit, open files, threads, memory; one sentence before any rank starts."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from plait.check import capacity, memory
from plait.check.prepare import lost_steps, slow_float32
from plait.contract.config import Config, Launch, Precision, Train
from plait.host import compose
from plait.testing import is_about, raises_about
from plait_testing.project import STARTED


def test_eight_ranks_fit_on_two_cores() -> None:
    plenty = mock.patch.object(capacity, "_free_bytes", return_value=None)
    with mock.patch.object(capacity, "cores", return_value=2), plenty:
        capacity.check_ranks(32, "cpu")
        with raises_about("launch.nproc_per_node", 33, "at most 32"):
            capacity.check_ranks(33, "cpu")


def test_a_gpu_holds_one_rank() -> None:
    with mock.patch("torch.accelerator.device_count", return_value=4):
        capacity.check_ranks(4, "cuda")
        with raises_about("launch.nproc_per_node", 5, "at most 4"):
            capacity.check_ranks(5, "cuda")


def test_ranks_need_open_files(plait_project) -> None:
    """torch tells of too few by stacks of C++, or by nothing at all."""
    with mock.patch("resource.getrlimit", return_value=(16, 4096)):
        is_about(plait_project("train", "launch.device=cpu").error, "ulimit -n", 16, "at least 64")
    for most in (64, resource.RLIM_INFINITY):
        with mock.patch("resource.getrlimit", return_value=(most, most)):
            capacity.check_open_files()


def test_ranks_need_threads(plait_project, tmp_path) -> None:
    """Without them gloo ends ranks by SIGABRT, and the launcher restarts them."""
    (tmp_path / "three.py").write_text("import os; os._exit(3)", encoding="utf-8")
    with mock.patch.object(capacity, "START", tmp_path / "three.py"):
        with raises_about("ulimit -u", 3, "room for 26 more threads"):
            capacity.check_ranks(2, "cpu")
        is_about(plait_project("train", "launch.device=cpu").error, "ulimit -u", 3)
    with mock.patch("subprocess.run", side_effect=BlockingIOError(errno.EAGAIN, "")), raises_about("ulimit -u", 0):
        capacity.check_ranks(1, "cpu")
    capacity.check_ranks(2, "cpu")


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, whom no such limit binds")
def test_the_limit_of_processes_is_met() -> None:
    """Of a user that has none yet."""
    code = "from plait.check.capacity import check_threads; check_threads(1)"
    other, few = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"], 'ulimit -u 9; exec "$@"'
    if subprocess.run([*other, sys.executable, "-c", code], check=False).returncode:
        pytest.skip("another user may not read this Python")
    command = [*other, "bash", "-c", few, "-", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert "7 can be started: no further process or thread may be started; this user may have 9" in done.stderr


@pytest.mark.parametrize(
    ("size", "nnodes", "shapes", "about", "said"),
    [
        (9, 1, {}, None, ""),
        (10, 1, {}, ("train.local_batch_size", 10), ""),
        (1, 1, {"a": (50, 50)}, None, ""),  # in the dtype that stores them
        (1, 1, {"a": (50, 50), "b": (1,)}, ("precision.storage", "float32"), "this machine has 9.77 KiB"),
        (1, 2, {"a": (100, 100)}, ("precision.storage", "float32"), "2 machines like this one have 19.53 KiB"),
    ],
)
def test_tokens_and_parameters_need_memory(monkeypatch, size, nnodes, shapes, about, said) -> None:
    monkeypatch.setattr(memory, "_memory", lambda: 10_000)
    layout = SimpleNamespace(count={"batch": 4, "sequence": 2}.get)
    precision, train = Precision(storage="float32"), Train(seq_len=16, local_batch_size=size)
    config = Config(train=train, launch=Launch(nnodes=nnodes), precision=precision)
    checked = SimpleNamespace(config=config, layout=layout, shapes=shapes)
    if about is None:
        memory.check_room(checked)
        return
    with raises_about(*about) as caught:
        memory.check_room(checked)
    assert said in str(caught.value)


def test_ranks_need_memory(tmp_path, monkeypatch) -> None:
    memory, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    memory.write_text("MemTotal: 9000000 kB\nMemAvailable:     614400 kB\nSwapFree:         204800 kB\n")  # 800 MiB
    monkeypatch.setattr(capacity, "MEMORY", str(memory))
    monkeypatch.setattr(capacity, "LIMITS", (str(limit),))
    for text in (None, "max\n"):
        if text:
            limit.write_text(text)
        capacity.check_ranks(4, "cpu")
        with raises_about("launch.nproc_per_node", 5, "at most 4") as caught:
            capacity.check_ranks(5, "cpu")
        assert "800 MiB" in str(caught.value)
    limit.write_text(f"{300 << 20}\n")  # a container's
    with raises_about("launch.nproc_per_node", 2, "at most 1"):
        capacity.check_ranks(2, "cpu")
    memory.write_text("MemAvailable: 0 kB\nSwapFree: 0 kB\n")
    capacity.check_ranks(1, "cpu")  # nobody knows better than who asks for one
    memory.unlink()
    limit.unlink()
    capacity.check_ranks(8, "cpu")


def test_slow_float32_on_a_gpu_is_said_once_with_what_helps(plait_project) -> None:
    said = slow_float32(Precision(), "cuda")
    assert said is not None
    advised = [word.strip("();,") for word in said.split() if "=" in word]
    assert len(advised) == 2, said
    for override in advised:
        assert slow_float32(compose([override]).precision, "cuda") is None
    with mock.patch("plait.check.prepare.device_of", return_value="cuda"):
        done = plait_project("train", "launch.device=cpu", "run.name=a")
    assert (done.code, done.out.count(said)) == (STARTED, 1), done.err
    assert slow_float32(Precision(param="bfloat16"), "cuda") is None
    assert slow_float32(Precision(), "cpu") is None
    with mock.patch("torch.get_float32_matmul_precision", return_value="high"):
        assert slow_float32(Precision(), "cuda") is None


@pytest.mark.parametrize(
    ("storage", "lr", "told"),
    [("bfloat16", 1e-5, True), ("bfloat16", 3e-3, False), ("float32", 1e-7, False)],
)
def test_steps_that_the_dtype_of_the_weights_rounds_away_are_said(storage: str, lr: float, told: bool) -> None:
    one = torch.ones((), dtype=getattr(torch, storage))
    if storage != "float32":
        assert (float(one - lr) == 1) == told  # what is said is true
    assert (lost_steps(Precision(storage=storage), lr) is not None) == told
    assert lost_steps(Precision(storage=storage), None) is None
