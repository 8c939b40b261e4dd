"""Each benchmark starts and prints what its README promises, with settings too small to measure anything."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import environment

FOLDER = Path(__file__).parents[2] / "benchmarks"
TINY = [
    *("model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=48"),
    *("train.seq_len=32", "train.local_batch_size=2", "schedule.warmup_steps=2"),
]

ONE_CYCLE = re.compile(r"(\d+\.\d\d) \(\1 to \1\)")  # its ratio is the median, the least and the greatest


def printed(script: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(FOLDER / script), *arguments]
    env = environment(CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def table(text: str) -> list[list[str]]:
    """The rows of the tables in `text`, without rules and the first head."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.py")))
def test_what_a_benchmark_imports_of_plait_is_there(script: str) -> None:
    """Also what it imports inside functions: most tables take minutes, so no test prints them."""
    for node in ast.walk(ast.parse((FOLDER / script).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("plait"):
            module = importlib.import_module(node.module or "")
            for each in node.names:
                there = hasattr(module, each.name) or importlib.util.find_spec(f"{node.module}.{each.name}")
                assert there, f"{script} imports {each.name} from {node.module}"


@pytest.mark.slow
def test_overhead_compares_three_loops(tmp_path: Path) -> None:
    text = printed("overhead.py", "--cycles=4", "--warm-up=1", *TINY, cwd=tmp_path)
    assert text.count("4 steps of each loop") == 2
    assert text.count("plait / bare") == text.count("A / A'") == 12
    assert text.count("trained to step 5") == 2
    assert not list(tmp_path.iterdir()), "the run belongs into a folder of its own"


@pytest.mark.slow
def test_muon_comes_beside_its_parts(tmp_path: Path) -> None:
    text = printed("muon.py", "--cycles=2", "--warm-up=1", cwd=tmp_path)
    assert [text.count(name) for name in ("muon under fsdp2:", "its share alone:", "its collectives alone:")] == [1] * 3
    assert "step / its parts: " in text


def test_the_commands_of_a_second_start_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not run here: four compiled starts take a minute of the processor."""
    from plait.host import compose

    monkeypatch.syspath_prepend(str(FOLDER))
    runs = __import__("second_start").RUNS
    assert list(runs) == ["fsdp2", "simplefsdp"]
    for name, (_, command, *overrides) in runs.items():
        config = compose(overrides)
        assert (command, list(config.strategy), config.compile.enabled) == ("train", [name], True)
        assert config.train.steps == 1


@pytest.mark.slow
def test_saves_and_loads_come_beside_torchs(tmp_path: Path) -> None:
    text = printed("checkpoints.py", "--cycles=1", "--megabytes=26", f"--folder={tmp_path}", cwd=tmp_path)
    assert "25 MB on 2 ranks, 1 cycles" in text
    wanted = ["a synchronous save", "an asynchronous save stands still", "the load of a resume"]
    assert [row[0] for row in table(text)] == wanted
    assert all(len(row) == 5 and ONE_CYCLE.fullmatch(row[3]) and ONE_CYCLE.fullmatch(row[4]) for row in table(text))
    assert "The first asynchronous save" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_tokenising_comes_beside_the_library(tmp_path: Path) -> None:
    text = printed("tokenising.py", "--mb=1", "--rounds=1", cwd=tmp_path)
    assert [row[0] for row in table(text)] == ["plait", "encode_batch", "encode_batch_fast"]
    first = float(table(text)[0][1])
    for _, speed, ratio, peak in table(text):
        assert float(ratio.split()[0]) == pytest.approx(first / float(speed), rel=0.05)
        assert float(peak) > 20, "an interpreter takes as much"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_first_step_comes_beside_a_bare_loop(tmp_path: Path) -> None:
    text = printed("first_step.py", "--cycles=1", "--warm-up=0", *TINY, "schedule.warmup_steps=0", cwd=tmp_path)
    wanted = ["a first word", "the first step is done", "the end after that", "in all"]
    assert [row[0] for row in table(text)] == wanted
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # without those whose environments pip fills
def test_peers_come_beside_a_bare_loop(tmp_path: Path) -> None:
    options = ("--cycles=1", "--warm-up=0", "--steps=3", "--only", "plait", "--", *TINY, "schedule.warmup_steps=0")
    text = printed("peers.py", *options, cwd=tmp_path)
    rows = table(text)
    assert [row[0] for row in rows if len(row) == 3 and row[0] in ("bare", "plait")] == ["bare", "plait"] * 4
    bare = [row for row in rows if row[0] == "bare"]
    assert [row[2].split()[0] for row in bare] == ["1.00"] * 4, "relative to itself"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # as above
def test_finetuning_has_the_losses_of_a_bare_loop(tmp_path: Path) -> None:
    options = ("--cycles=1", "--warm-up=0", "--steps=3", "--conversations=60", "--only", "plait", "--")
    text = printed("finetune.py", *options, "train.local_batch_size=1", cwd=tmp_path)
    rows = table(text)
    assert [row[0] for row in rows] == ["plait", "bare"]
    rates = [float(row[1].replace(",", "")) for row in rows]
    assert float(rows[0][2].split()[0]) == pytest.approx(rates[0] / rates[1], rel=0.05)
    assert all(float(row[4]) < 1e-3 for row in rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # as above
def test_a_family_has_the_losses_of_a_bare_loop_on_4_ranks(tmp_path: Path) -> None:
    text = printed("families.py", "nemotron_h", "--steps=3", "--beside=bare", cwd=tmp_path)
    rows = table(text)
    layouts = ["fsdp2", "tensor_parallel 2, fsdp2 2", "expert_parallel 2 of fsdp2 4"]
    assert [row[:2] for row in rows] == [["nemotron_h", layout] for layout in layouts]
    assert all(float(row[3]) < 5e-6 for row in rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_startup_finds_no_torch_and_no_foreign_rows(tmp_path: Path) -> None:
    text = printed("startup.py", "--repeats=1", "--model=llama3_debug", "--world=8", cwd=tmp_path)
    assert text.count("; no torch") == 2
    assert "imports torch" not in text
    assert text.count("within its own rows") == 4
    assert "one rank of 8" in text
    matrices, norms = 2_894_080 - 9 * 256, 9 * 256  # an eighth of the former, the latter whole
    assert f"s to draw {matrices // 8 + norms:,} elements" in text
    assert "s for llama3_debug on 16 cores, ESTIMATED: 2,894,080 values" in text


@pytest.mark.slow
def test_worlds_compares_them(tmp_path: Path) -> None:
    options = ("--worlds", "8", "64", "--tensor=2", "--experts=2", "--repeats=1")
    text = printed("worlds.py", "deepseek_v3_debug", *options, cwd=tmp_path)
    rows = table(text)
    assert [row[1] for row in rows] == ["fsdp2", "fsdp2, TP 2", "fsdp2, TP 2, EP 2"]


@pytest.mark.slow
def test_throughput_says_that_a_processor_is_no_gpu(tmp_path: Path) -> None:
    text = printed("throughput.py", *TINY, "train.steps=6", "compile.backend=eager", cwd=tmp_path)
    assert "NOT MEASURED ON A GPU" in text
    runs = [line.split(" | ") for line in text.splitlines() if line.startswith("llama3_debug |")]
    assert [(run[1], run[2]) for run in runs] == [("eager", "2 x 32"), ("compiled", "2 x 32")]
    assert [run[7] for run in runs] == ["unknown"] * 2


@pytest.mark.slow
def test_throughput_reports_a_run_that_fails_and_goes_on(tmp_path: Path) -> None:
    text = printed("throughput.py", *TINY, "train.seq_len=4096", cwd=tmp_path)
    assert text.count("train.seq_len=4096 is longer than the model's") == 2


@pytest.mark.slow
def test_logits_shrink_with_the_degree(tmp_path: Path) -> None:
    text = printed("logits.py", "--vocab=4096", "--tokens=64", "--degrees", "1", "4", cwd=tmp_path)
    rows = table(text)
    found = {(int(ranks), switch, chunks): float(sets) for ranks, switch, chunks, _, sets in rows}
    peak = {(ranks, switch): sets for (ranks, switch, chunks), sets in found.items() if chunks == "1"}
    assert peak[4, "on"] == peak[1, "on"] / 4
    assert peak[4, "off"] >= peak[1, "off"] > peak[4, "on"]
    assert all(found[ranks, switch, "8"] <= peak[ranks, switch] / 6 for ranks, switch in peak)


@pytest.mark.slow
def test_experts_are_grouped_and_spread(tmp_path: Path) -> None:
    text = printed("experts.py", "--ranks=2", "--cycles=2", "--warm-up=1", "--batch=1", "--seq-len=32", cwd=tmp_path)
    assert "NOT MEASURED ON A GPU" in text
    rows = table(text)
    assert sum(row[4] in ("float32", "bfloat16") for row in rows if len(row) == 8) == 6
    spread = [row for row in rows if len(row) == 4][1:]
    assert [row[0] for row in spread] == ["1", "2"]
    tokens = [float(row[1]) / 1000 * float(row[2].replace(",", "")) for row in spread]
    assert tokens == pytest.approx([2 * 1 * 32] * 2, rel=0.05), "ranks, batch and length"


@pytest.mark.slow
def test_one_graph_beside_blocks(tmp_path: Path) -> None:
    text = printed(
        *("whole_graph.py", "--model=llama3_debug model.n_layers=1", "--cycles=2", "--warm-up=1", "--batch=1"),
        *("--ranks=1", "--seq-len=32", "--backends", "none", "aot_eager"),  # inductor's compilation takes a minute
        cwd=tmp_path,
    )
    assert "NOT MEASURED ON A GPU" in text
    rows = table(text)
    assert [row[0] for row in rows] == ["none", "aot_eager"]
    for _, fsdp2, simplefsdp, ratio in rows:
        rates = [float(rate.replace(",", "")) for rate in (fsdp2, simplefsdp)]
        assert float(ratio.split()[0]) == pytest.approx(rates[1] / rates[0], rel=0.05)


@pytest.mark.slow
def test_planned_estimates_every_set_of_passes(tmp_path: Path) -> None:
    text = printed("planned.py", "--model=llama3_debug model.n_layers=2", "--ranks=8", "--seq-len=128", cwd=tmp_path)
    assert "ESTIMATED, NOT MEASURED" in text
    rows = table(text)
    exposed, bound = ({row[0]: float(row[column]) for row in rows} for column in (4, 6))
    assert all(bound[passes] <= exposed[passes] <= exposed["none"] for passes in exposed)
    assert exposed["bucket_block + reorder"] < exposed["bucket_block"] < exposed["none"]


def test_the_bare_loop_is_short_and_needs_torch_the_model_and_the_data_alone() -> None:
    source = (FOLDER / "bare_loop.py").read_text()
    assert len(source.splitlines()) <= 80
    top = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in top if isinstance(node, ast.ImportFrom) and node.module}
    assert {m for m in modules if m.startswith("plait")} == {"plait_models.llama3", "plait_data.stdlib"}
    assert {m.split(".")[0] for m in modules} == {"torch", "plait_data", "plait_models", "sys", "typing"}
