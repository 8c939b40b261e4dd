"""metrics.jsonl holds what it was given, through kills and resumes; sinks get what the config asks for."""

import json
import math
import os
import random
import signal
import struct
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from plait.contract.config import Config, Named
from plait.contract.config import Metrics as Conf
from plait.contract.errors import PlaitError
from plait.records import sinks as sinks_of_a_run
from plait.records.metrics import KEYS, MetricsFile, peak, read
from plait.records.peak_flops import peak_flops
from plait.records.sinks import MetricsSinks, check, selected
from plait.testing import raises_about


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.jsonl"


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 5.0 / step, "grad_norm": 0.5, "lr": 1e-3, "tokens": 64 * step, **more}


def written(path: Path, steps: range) -> MetricsFile:
    file = MetricsFile(path)
    for step in steps:
        file.log(row(step))
    return file


def steps(path: Path) -> list[int]:
    return [r["step"] for r in read(path)]


def test_floats_read_back_bitwise(path: Path) -> None:
    draw = random.Random(0)
    values = [struct.unpack("d", draw.randbytes(8))[0] for _ in range(500)] + [0.1, -0.0, 5e-324, 1.7e308]
    file = MetricsFile(path)
    for step, value in enumerate(values):
        file.log({"step": step, "loss": value})
    for value, back in zip(values, read(path), strict=True):
        if math.isfinite(value):
            assert struct.pack("d", back["loss"]) == struct.pack("d", value)
        else:
            assert back["loss"] is None


def test_not_a_number_is_null_and_the_line_is_strict_json(path: Path) -> None:
    MetricsFile(path).log({"step": 1, "loss": math.nan, "grad_norm": math.inf, "mfu": None})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    line = json.loads((path).read_text(), parse_constant=refuse)
    assert line == {"step": 1, "loss": None, "grad_norm": None, "mfu": None}


def test_keys_keep_the_published_order_and_others_follow(path: Path) -> None:
    backwards = dict.fromkeys((*reversed(KEYS), "memory_kind", "another"), 1)
    MetricsFile(path).log(backwards)
    assert list(read(path)[0]) == [*KEYS, "memory_kind", "another"]


def test_each_line_is_one_write_that_lies_in_the_file_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: writes.append(bytes(data)) or real(fd, data))
    file = MetricsFile(path)
    for step in (1, 2):
        file.log(row(step))
        assert steps(path) == list(range(1, step + 1))
    assert [w.count(b"\n") for w in writes] == [1, 1]


def test_resume_cuts_what_is_past_the_step_and_keeps_the_rest_as_it_was(tmp_path: Path, path: Path) -> None:
    file = written(path, range(1, 8))
    kept = path.read_text().splitlines()[:5]
    assert file.resume(5) == 5
    assert path.read_text().splitlines() == kept
    file.log(row(6))
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    assert [f.name for f in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("torn", ['{"step": 4, "loss": 0.', "{", '"ste', '{"step": 4}garbage', "4"])
def test_a_torn_last_line_is_left_out_and_cut(torn: str, path: Path) -> None:
    file = written(path, range(1, 4))
    with open(path, "a") as raw:
        raw.write(torn)
    assert steps(path) == [1, 2, 3]
    assert file.resume(9) == 3
    file.log(row(4))
    assert steps(path) == [1, 2, 3, 4]


def test_a_last_line_that_lacks_only_its_end_is_kept(path: Path) -> None:
    file = written(path, range(1, 4))
    path.write_bytes(path.read_bytes()[:-1])
    assert file.resume(9) == 3
    file.log(row(4))
    assert steps(path) == [1, 2, 3, 4]


def test_resume_from_nothing_starts_an_empty_file(path: Path) -> None:
    assert MetricsFile(path).resume(7) == 0
    assert steps(path) == []
    assert written(path, range(1, 4)).resume(0) == 0
    assert steps(path) == []


def test_damage_in_the_middle_is_named_and_nothing_is_touched(path: Path) -> None:
    file = written(path, range(1, 4))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:9], lines[2], ""]))
    before = path.read_bytes()
    with pytest.raises(PlaitError, match=r"line 2 of .*m\.jsonl is damaged"):
        file.resume(3)
    assert path.read_bytes() == before


def test_a_killed_resume_leaves_the_file_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(path, range(1, 8))
    before = path.read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        file.resume(2)
    assert path.read_bytes() == before


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=r"cannot read the metrics file .*none\.jsonl: No such file"):
        read(tmp_path / "none.jsonl")


def test_a_killed_writer_tears_at_most_its_last_line(path: Path) -> None:
    code = (
        "import sys, itertools; from plait.records.metrics import MetricsFile\n"
        "file = MetricsFile(sys.argv[1])\n"
        "for step in itertools.count(1): file.log({'step': step, 'loss': step / 3, 'pad': 'x' * 400})"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    while not path.exists() or path.stat().st_size < 200_000:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    last = MetricsFile(path).resume(10**9)
    assert steps(path) == list(range(1, last + 1))


def test_metrics_need_no_torch() -> None:
    code = "import sys; from plait.host import metrics, numbers, writing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def config(**metrics: bool | None) -> Config:
    return Config(run=Named("a-run"), metrics=Conf(**metrics))


def test_places_are_only_those_asked_for(tmp_path: Path) -> None:
    with MetricsSinks(tmp_path, config(tensorboard=False)) as sinks:
        sinks.row(row(1))
    assert [f.name for f in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_curves_are_drawn_where_their_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(selected(config(tensorboard=None))) == ["tensorboard"]
    monkeypatch.setenv("PLAIT_DISABLE_PLUGINS", "tensorboard")
    assert list(selected(config(tensorboard=None))) == []
    assert list(selected(config(tensorboard=True))) == ["tensorboard"]
    with (
        mock.patch("plait.records.sinks.installed", return_value={}),
        raises_about("metrics.tensorboard", True) as told,
    ):
        check(config(tensorboard=True).metrics)
    assert "pip install plait-tensorboard" in str(told.value)


def test_wandb_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks_of_a_run.importlib.util, "find_spec", lambda name: None)
    with raises_about("metrics.wandb", True, (False,)):
        MetricsSinks(tmp_path, config(wandb=True))
    assert list(tmp_path.iterdir()) == []


def test_wandb_gets_numbers_and_the_same_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class FakeRun:
        def log(self, values: dict[str, float], step: int) -> None:
            calls.append((step, values))

        def finish(self) -> None:
            calls.append("finished")

    fake = types.ModuleType("wandb")
    fake.init = lambda **options: calls.append(options) or FakeRun()  # type: ignore[attr-defined]
    fake.util = types.SimpleNamespace(generate_id=iter(["one", "two"]).__next__)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(sinks_of_a_run.importlib.util, "find_spec", lambda name: fake)
    for resume_step in (0, 1):
        with MetricsSinks(tmp_path, config(tensorboard=False, wandb=True), resume_step) as sinks:
            sinks.row({"step": resume_step + 1, "loss": 2.0, "mfu": None, "memory_kind": "resident_peak"})
    inits = [call for call in calls if isinstance(call, dict)]
    assert [(c["id"], c["name"], c["config"]["train"]["seed"], c["resume"]) for c in inits] == [
        ("one", "a-run", 0, "allow")
    ] * 2
    assert [call for call in calls if isinstance(call, tuple)] == [(1, {"loss": 2.0}), (2, {"loss": 2.0})]
    assert calls.count("finished") == 2


def test_the_peak_is_the_most_memory_of_any_step() -> None:
    rows = [{"step": n, "peak_memory_bytes": memory} for n, memory in enumerate((5, None, 9, 7))]
    assert peak([*rows, {"step": 4}]) == 9
    assert peak([{"step": 1, "peak_memory_bytes": None}]) is None


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA A10", 125),
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4), ("NVIDIA H200 NVL", 835.5), ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250), ("NVIDIA GB200", 2500), ("NVIDIA L4", 121), ("NVIDIA L40", 181.05),
        ("NVIDIA L40S", 362.05), ("NVIDIA GeForce RTX 4090", 165.2), ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA A1000", None), ("Some GPU of the future", None),
    ],
)  # fmt: skip
def test_peaks_of_gpus(name: str, tflops: float | None) -> None:
    assert peak_flops("cuda", name, "bfloat16") == (None if tflops is None else tflops * 1e12)


def test_peaks_exist_for_half_precision_on_a_gpu_only() -> None:
    import torch

    assert peak_flops("cuda", "NVIDIA H100 80GB HBM3", torch.float16) == 989.4e12
    assert peak_flops("cuda", "NVIDIA H100 80GB HBM3", "float32") is None
    assert peak_flops("cpu", "cpu", "bfloat16") is None
