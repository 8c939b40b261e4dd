"""Plait trains on a device that another package brings: the steps are those of a CPU, in every layout.

The device's operators are the CPU's, but torch has no fused AdamW for it, which rounds otherwise: figures and weights
are equal within 1e-12. What is under test is which device and stream Plait asks for, and what it asks of them.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from plait_testing.project import PLAIT
from tools.hosted_device import build

pytestmark = [
    pytest.mark.slow,  # the device is compiled in half a minute
    pytest.mark.skipif(not (shutil.which("g++") and shutil.which("ninja")), reason="no compiler: g++ and ninja"),
]
BOUND = 1e-12
FLOAT64 = [f"precision.{each}=float64" for each in ("storage", "param", "reduce")]
TINY = [
    *(
        "launch.nproc_per_node=2",
        "train.seq_len=32",
        "train.local_batch_size=2",
        "train.steps=4",
        "run.name=a",
        *FLOAT64,
    ),
    *("validation.interval=4", "validation.batches=1", "checkpoint.interval=2"),
]
LAYOUTS = {
    "fsdp2": ["strategy=[fsdp2]"],
    "documents, recomputed": ["strategy=[fsdp2]", "data.attention=document", "remat.mode=full", "loss.chunks=2"],
    "muon": ["strategy=[fsdp2]", "optimizer=muon"],
    "simplefsdp": ["strategy=[simplefsdp]"],
    "tensor": ["strategy=[tensor_parallel]"],
    "context": ["strategy=[context_parallel,fsdp2]", "strategy.context_parallel.degree=2"],
    "pipeline": ["strategy=[pipeline]", "train.global_batch_size=4"],
    "expert": ["strategy=[expert_parallel,fsdp2]", "model=deepseek_v3_debug"],
}


@pytest.fixture(scope="module")
def device() -> dict[str, str]:
    """Variables of a process in which torch knows the device."""
    build.main()
    return {**os.environ, "PYTHONPATH": str(build.FOLDER), "OMP_NUM_THREADS": "1"}


def trained(folder: Path, environ: dict[str, str], *overrides: str) -> list[dict[str, Any]]:
    """The rows of a run in `folder`, which goes on if it was begun there."""
    done = subprocess.run(
        [PLAIT, "train", *TINY, *overrides], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = (folder / "runs/a/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def same(folder: Path, other: Path, rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Figures of the last two steps, and the weights after them."""
    for key in ("loss", "grad_norm", "tokens"):
        assert [row[key] for row in rows[-2:]] == pytest.approx([row[key] for row in others[-2:]], rel=BOUND), key
    assert rows[-1]["val_loss"] == pytest.approx(others[-1]["val_loss"], rel=BOUND)
    mine, theirs = (load_file(each / "runs/a/export/model.safetensors") for each in (folder, other))
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        assert (weight - theirs[name]).abs().max() <= BOUND * weight.abs().max(), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_device_of_another_package_trains_as_a_cpu(name: str, device: dict[str, str], tmp_path: Path) -> None:
    """The whole command, from choosing the device to the export."""
    found = {}
    for chosen in ("cpu", "auto"):
        (tmp_path / chosen).mkdir()
        found[chosen] = trained(tmp_path / chosen, device, *LAYOUTS[name], f"launch.device={chosen}")
    same(tmp_path / "cpu", tmp_path / "auto", found["cpu"], found["auto"])
    assert found["auto"][-1]["memory_kind"] == "hosted_allocator_peak"
    if name == "fsdp2":  # a run begins on a CPU and ends on the device
        (moved := tmp_path / "moved").mkdir()
        for chosen, last in (("cpu", 2), ("auto", 4)):
            rows = trained(moved, device, *LAYOUTS[name], f"launch.device={chosen}", f"train.steps={last}")
        same(tmp_path / "cpu", moved, found["cpu"], rows)


def test_a_device_that_is_not_here_is_refused_with_those_that_are(device: dict[str, str], tmp_path: Path) -> None:
    command = [PLAIT, "inspect", "strategy=[]", "launch.device=xpu"]
    done = subprocess.run(command, cwd=tmp_path, env=device, capture_output=True, text=True, check=False)
    told = "launch.device=xpu, but torch sees hosted here; use launch.device=cpu or auto or hosted"
    assert (done.returncode, told in done.stderr) == (1, True), done.stderr


def test_each_rank_takes_a_device_of_its_own(device: dict[str, str], tmp_path: Path) -> None:
    """As many ranks as devices are started; more are refused."""
    short = ["strategy=[fsdp2]", *TINY[1:], "train.steps=1"]
    for asked, told in (("auto", "launch: local, 3 rank(s)"), ("4", "which can hold 3")):
        command = [PLAIT, "train", *short, f"launch.nproc_per_node={asked}", f"run.name={asked}"]
        environ = {**device, "HOSTED_DEVICES": "3"}
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert told in done.stdout + done.stderr, done.stdout + done.stderr


MEASURE = """
from pathlib import Path
from plait_plan.calibrate import Sizes
from plait_plan.commands.calibrate import measured, written

if __name__ == "__main__":
    found = measured("hosted", 2, Sizes(2**16, (32, 64), (2**10, 2**14)))
    Path("conf/cluster").mkdir(parents=True)
    Path("conf/cluster/here.yaml").write_text(written(found, "hosted", 2))
"""


def test_its_ranks_measure_it_and_a_plan_takes_the_figures(device: dict[str, str], tmp_path: Path) -> None:
    """The sizes of a GPU would take a CPU many minutes."""
    (tmp_path / "measure.py").write_text(MEASURE, encoding="utf-8")
    plan = [PLAIT, "plan", "strategy=[fsdp2]", "cluster=here", "world=2", "validation.interval=0"]
    for command in ([sys.executable, "measure.py"], plan):
        done = subprocess.run(command, cwd=tmp_path, env=device, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "a device in the memory of the host" in done.stdout
    assert "device: hosted" in (tmp_path / "conf/cluster/here.yaml").read_text(encoding="utf-8")
    for asked, said in ((["device=cuda"], "torch sees hosted here"), (["ranks=9"], "there are 4")):
        command = [PLAIT, "calibrate", "name=other", *asked]
        done = subprocess.run(command, cwd=tmp_path, env=device, capture_output=True, text=True, check=False)
        assert (done.returncode, said in done.stderr) == (1, True), done.stderr
