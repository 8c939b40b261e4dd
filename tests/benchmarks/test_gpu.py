"""`make gpu` on a CPU: the same parts, with small models; and what it makes of Plait's configs and of results."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import environment

FOLDER = Path(__file__).parents[2] / "benchmarks"
SOME = ("tests", "llama3_1b/plait/*", "deepseek*", "llama3_1b/saves")
SMALL = ("ring attention", "profile", "plan and allocator: llama3_1b", "llama3_1b/float32*", "calibrate")
COMMAND = [sys.executable, str(FOLDER / "gpu.py"), "--dry-run", "--rounds=1", "--date=2026-01-02"]


@pytest.fixture
def benchmark(monkeypatch):
    """A module of benchmarks/, by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name: __import__(name)


def started(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [*COMMAND, f"--results={folder}", *([] if "--only" in options else ["--only", *SOME]), *options]
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
        command, cwd=folder, env=environment(CUDA_VISIBLE_DEVICES=""), text=True, start_new_session=True, **pipe
    )


@pytest.mark.slow
def test_a_cut_loses_nothing(tmp_path: Path) -> None:
    found, table = tmp_path / "2026-01-02-dry-run.json", tmp_path / "2026-01-02-dry-run.md"
    first = started(tmp_path)
    deadline = time.monotonic() + 200
    while not (found.exists() and "llama3_1b/plait/1" in found.read_text()):
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    kept = json.loads(found.read_text())["parts"]
    assert list(kept) == ["tests", "llama3_1b/plait/1"]
    second = started(tmp_path)
    said = second.communicate(timeout=280)[0]
    assert second.returncode == 0, said
    parts = json.loads(found.read_text())["parts"]
    assert list(parts) == [*kept, "deepseek_v3_16b/plait/1", "deepseek_v3_16b/torchtitan/1", "llama3_1b/saves"]
    assert {name: parts[name] for name in kept} == kept, "they are not run again"
    assert "skipped" in parts["tests"]["said"]
    for name in ("llama3_1b/plait/1", "deepseek_v3_16b/plait/1", "llama3_1b/saves"):
        assert all(3 < loss < 8 for loss in parts[name]["losses"])
    assert parts["llama3_1b/saves"]["stand_still_seconds"].keys() == {"first", "later"}
    absent = None if find_spec("torchtitan") else "torchtitan is not installed"
    assert parts["deepseek_v3_16b/torchtitan/1"].get("failed") == absent
    text = table.read_text()
    assert "NOT MEASURED ON A GPU" in text
    assert f"| llama3_1b | 2 x 32 | none | {parts['llama3_1b/plait/1']['tokens_per_second']:,.0f} | - |" in text
    assert "| llama3_1b | saves |" in text


@pytest.mark.slow
def test_a_part_that_the_whole_limit_cuts_is_still_to_do(tmp_path: Path) -> None:
    process = started(tmp_path, "--minutes=0.01")
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    assert "tests: the 0.01 minutes are over; the same command goes on here" in said
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.slow
def test_the_small_parts_say_what_they_found(tmp_path: Path) -> None:
    process = started(tmp_path, "--only", *SMALL)
    said = process.communicate(timeout=280)[0]
    assert process.returncode == 0, said
    parts = json.loads((tmp_path / "2026-01-02-dry-run.json").read_text(encoding="utf-8"))["parts"]
    assert {name: record["failed"] for name, record in parts.items() if "failed" in record} == {}
    assert len(parts) == len(SMALL)
    assert parts["ring attention"]["said"] == "the fused kernel is used"
    for name, words in (
        ("profile", "| `aten::mm` |"),
        ("plan and allocator: llama3_1b", "| allocated |"),
        ("calibrate", "launch:"),
    ):
        assert words in parts[name]["said"], name
    assert any("precision.param=float32" in record.get("overrides", ()) for record in parts.values())


def test_a_model_that_the_gpu_cannot_hold_is_left_out_with_a_sentence(benchmark, tmp_path: Path) -> None:
    gpu, log = benchmark("gpu"), tmp_path / "log"
    large = [part for part in gpu.parts(False, 1, memory=79.1) if part.name.startswith("llama3_8b/")]
    records = {part.name: part.run(part.seconds, log) for part in large}
    sentence = "llama3_8b takes 121 GiB, and this GPU has 79"
    assert records == {f"llama3_8b/{side}/1": {"skipped": sentence} for side in ("plait", "torchtitan")}
    assert all(gpu.brief(record) == f"left out: {sentence}" for record in records.values())
    text = benchmark("gpu_results").table({"title": "T", "conditions": "C"}, records)
    assert f"## Left out\n\n- llama3_8b/plait/1: {sentence}" in text
    assert "Failed" not in text


def test_a_trace_in_short(benchmark) -> None:
    def ran(name: str, start: float, took: float, cat: str = "kernel") -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": took}

    beside = [ran("copy", 1500, 1000, "gpu_memcpy"), ran("aten::mm", 0, 9000, "cpu_op"), {"ph": "i", "ts": 0}]
    lines = benchmark("gpu_profile").table([ran("long", 0, 2000), ran("short", 3000, 500), *beside], 2).splitlines()
    # Two steps from 0 to 3.5 ms; busy from 0 to 2.5 and from 3 to 3.5.
    assert lines[0] == "Per step: 2 kernels and copies, 1.75 ms; idle 14.3% of it."
    assert lines[4:] == [
        "| `long` | 0.5 | 1.000 | 57.1% |",
        "| `copy` | 0.5 | 0.500 | 28.6% |",
        "| `short` | 0.5 | 0.250 | 14.3% |",
    ]
    many = benchmark("gpu_profile").table([ran(f"{n}", n, 1) for n in range(99)], 1).splitlines()
    assert len(many[4:]) == 15


def test_every_part_has_a_limit_and_a_name_of_its_own(benchmark) -> None:
    gpu = benchmark("gpu")
    for dry in (True, False):
        parts = list(gpu.parts(dry, 2))
        assert len({part.name for part in parts}) == len(parts) > 20
        assert all(0 < part.seconds <= 420 for part in parts)
        first, second = ([part.name for part in parts if part.name.endswith(f"/{n}")] for n in (1, 2))
        assert [name[:-1] for name in first] != [name[:-1] for name in second], "sides take turns at being first"
        assert sorted(name[:-1] for name in first) == sorted(name[:-1] for name in second)


def test_what_a_save_costs_is_what_the_steps_after_it_lose(benchmark) -> None:
    """The save of the last step, which no step follows, does not count."""
    slow = {3: 1.25, 4: 1.5, 7: 1.125, 8: 1.25}  # seconds of steps; step 3 is not after a save
    rows = [{"step": step, "tokens": 8 * step, "tokens_per_second": 8 / slow.get(step, 1)} for step in range(1, 10)]
    assert benchmark("gpu").stand_still(rows, 0, 3) == [0.5, 0.375]
    assert benchmark("gpu").stand_still(rows, 0, 4) == [0.125 + 0.25, 0]


@pytest.mark.slow
def test_all_compositions_are_valid(benchmark) -> None:
    from plait.host import compose

    gpu = benchmark("gpu")
    for case in gpu.CASES:
        for each in (case, gpu.small(case)):
            config = compose([*gpu.overrides_of(each, True, list(gpu.ALONE))])
            assert config.compile.enabled
            assert (config.precision.storage, config.precision.param) == ("float32", "bfloat16")
    for name, more in gpu.VARIANTS.items():
        config = compose([*gpu.overrides_of(gpu.CASES[0], True, [*gpu.ALONE, *more(gpu.CASES[0])])])
        if name == "saves":
            warm_up, every = gpu.CASES[0].warm_up, config.checkpoint.interval
            assert warm_up < every < 2 * every < config.train.steps, "two saves are measured"


@pytest.mark.parametrize("model", ["llama3_1b", "llama3_8b", "llama3_debug"])
def test_torchtitans_feed_forward_gets_the_same_width(benchmark, model: str) -> None:
    from plait.host import compose

    config = compose([f"model={model}"]).model
    named = benchmark("torchtitan_run").llama3(config)
    width = int(named["ffn_dim_multiplier"] * int(2 * 4 * config["dim"] / 3))  # how its FeedForward computes it
    multiple = named["multiple_of"]
    assert multiple * ((width + multiple - 1) // multiple) == config["ffn_dim"]


def test_the_table_joins_runs_and_names_what_failed(benchmark) -> None:
    table = benchmark("gpu_results").table

    def run(speed, memory=2**30):
        figures = {"tokens_per_second": speed, "step_seconds": 1, "mfu": speed / 1000, "peak_memory_bytes": memory}
        return {**figures, "batch": "4 x 4096", "recomputed": "none"}

    parts = {
        "tests": {"said": "12 passed in 60 s"},
        "m/plait/1": run(500),
        "m/torchtitan/1": run(400, 2**31),
        "m/torchtitan/2": {"failed": "out of memory"},
        "m/plait/2": run(520),
        "m/eager": run(255),
    }
    lines = table({"title": "T", "conditions": "C"}, parts).splitlines()
    assert "| m | 4 x 4096 | none | 500, 520 | 51.0% | 1.0 | 400 | 40.0% | 2.0 | 1.275 |" in lines
    assert "| m | eager | 255 | 25.5% | 1.0 | 0.500 | - |" in lines
    assert "- m/torchtitan/2: out of memory" in lines
    assert "12 passed in 60 s" in lines


def test_a_stand_in_is_a_wheel_that_needs_nothing(benchmark, tmp_path: Path) -> None:
    setup = benchmark("gpu_setup")
    setup.stand_in("some-thing", "1.2", tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.name == "some_thing-1.2+elsewhere-py3-none-any.whl"
    with zipfile.ZipFile(file) as wheel:
        assert b"Requires-Dist" not in wheel.read("some_thing-1.2+elsewhere.dist-info/METADATA")
    assert set(setup.LEFT_OUT) | set(setup.SOURCES) <= set(setup.pins())


def test_without_torch_or_wheels_it_says_so(benchmark, tmp_path: Path) -> None:
    """The Python of this test has torch; one without site-packages has none."""
    command = [str(FOLDER / "gpu_setup.py"), "environment", f"--wheels={tmp_path}", f"--at={tmp_path / 'venv'}"]
    for options, sentence in (((), "there are no wheels in"), (("-I", "-S"), "has no torch; name a Python")):
        done = subprocess.run([sys.executable, *options, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("make gpu: ")
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "venv").exists()


def test_a_part_that_fails_is_told_by_its_error(benchmark, tmp_path: Path) -> None:
    """The last line of torchrun is a ruler, that of torch a warning, and torchtitan warns of an error at its start."""
    process, log = benchmark("gpu").process, tmp_path / "log"
    logged = "[rank0]:[W1128 23:57:10 ProcessGroupNCCL.cpp:1575] Warning: an Error"
    for lines in (
        ["ValueError: planted", "=" * 9],
        ["WARNING - Error running lspci", "[rank0]:   in train", "[rank0]: ValueError: planted", logged],
    ):
        assert process(["-c", f"print(*{lines}, sep='\\n'); raise SystemExit(1)"], 60, log) == "ValueError: planted"
    assert process(["-c", "raise SystemExit('in short')"], 60, log) == "in short"


def test_the_environment_has_every_package_of_the_tree(benchmark) -> None:
    """One that lay outside of plugins/ was missing, and nothing started."""
    named = {
        tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]: folder
        for folder in benchmark("gpu_setup").PACKAGES
    }
    wanted = ["plait-fsdp2", *tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]["dependencies"]]
    assert {re.match(r"[\w-]+", need)[0] for need in wanted} <= named.keys()
