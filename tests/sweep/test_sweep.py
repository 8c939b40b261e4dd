"""A sweep with `-m`: which jobs there are, what is written down of them, and how the same command goes on.

No rank starts here: something else stands in for them. Whole sweeps are in test_whole_sweeps.py.
"""

import csv
import json
import os
import re
import signal
from pathlib import Path

import attrs
import pytest
import yaml

from plait.compose.overrides import check_sweep
from plait.contract.errors import PlaitError
from plait.records.metrics import MetricsFile
from plait.records.run_folder import Outcome
from plait.sweep.command import Command
from plait.testing import raises_about
from plait_testing.errors import is_about

TINY = (
    *("model.dim=32", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=32"),
    *("train.steps=4", "launch.device=cpu"),
)
SWEEP = ("train", "-m", "train.seed=1,2", "strategy=[fsdp2],[]", *TINY)
TWO = ("train", "-m", "train.seed=1,2", "strategy=[]", *TINY)


pytestmark = pytest.mark.usefixtures("plait_project")


@attrs.define
class Ranks:
    """Stands in for the ranks: a job "trains" at once, or ends as `ends` says for its number in the order of starts."""

    ends: dict = attrs.field(factory=dict)
    started: list = attrs.field(factory=list)

    def __call__(self, config, folder, nproc, *rest):
        self.started.append((folder.path.name, config.train.seed, nproc, config.strategy))
        end = self.ends.get(len(self.started) - 1)
        file = MetricsFile(folder.path / "metrics.jsonl")
        loss = 100 * config.optimizer["lr"] + config.train.seed
        for step in range(1, config.train.steps + (end is None)):
            row = {"step": step, "loss": loss, "tokens_per_second": 10.0 * step, "peak_memory_bytes": step << 30}
            file.log(row if step < config.train.steps else {**row, "val_loss": loss + 0.25})
        if isinstance(end, BaseException):
            raise end
        outcome = end or Outcome("finished", "trained", step=config.train.steps)
        folder.set_outcome(outcome)
        return outcome


def record(folder="runs/sweep"):
    return json.loads((Path(folder) / "sweep.json").read_text())["jobs"]


def states(folder="runs/sweep"):
    return [job["state"] for job in record(folder)]


def the_sweep():
    (folder,) = Path("runs").iterdir()
    return folder


IN = "hydra.sweep.dir=runs/sweep"


def test_each_job_is_a_run_and_its_end_is_in_the_table(plait_project):
    ranks = Ranks(
        {
            0: PlaitError("rank 1 was killed by SIGKILL; its log: somewhere"),
            1: Outcome("failed", "ValueError: made to fail", rank=0),
            2: OSError("no space left"),
        }
    )
    done = plait_project(*SWEEP, IN, ranks=ranks)
    assert done.code == 3
    assert [each[:3] for each in ranks.started] == [("0", 1, 2), ("1", 1, 1), ("2", 2, 2), ("3", 2, 1)]
    log = Path("runs/sweep/1/ranks/rank-0.log").absolute()
    reasons = [
        "rank 1 was killed by SIGKILL; its log: somewhere",
        f"ValueError: made to fail (rank 0; its log: {log})",
        "OSError: no space left",
    ]
    which = ["=1, strategy=[fsdp2]", "=1, strategy=[]", "=2, strategy=[fsdp2]", "=2, strategy=[]"]
    for number, what in enumerate(which):
        assert f"plait: job {number} of the sweep (train.seed{what}) starts: {number + 1} of 4\n" in done.out
    assert done.err.splitlines() == [
        f"plait: job {n} of the sweep (train.seed{what}) failed: {reason}"
        for n, (what, reason) in enumerate(zip(which[:3], reasons, strict=True))
    ]
    head, *lines = done.out.split("\n\n")[-2].splitlines()
    assert head.split() == ["job", "state", "loss", "val_loss", "tokens/s", "memory", "overrides", "reason"]
    assert [line.split()[1] for line in lines] == ["finished", "failed", "failed", "failed"]  # the best first
    lines = [*lines[1:], lines[0]]
    ends = [f"train.seed{what} {why}" for what, why in zip(which, [*reasons, "-"], strict=True)]
    words = [" ".join(line.split()) for line in lines]  # columns are as wide as their longest entry
    assert [line for line, end in zip(words, ends, strict=True) if not line.endswith(end)] == []
    assert lines[3].split()[2:7] == ["2.3000", "2.5500", "25", "4.00", "GiB"]
    assert done.out.endswith("sweep: 1 finished, 3 failed; this table is runs/sweep/sweep.csv\n")
    last = record()[3]
    assert {key: last[key] for key in ("job", "folder", "state", "step", "loss", "val_loss", "reason")} == {
        **{"job": 3, "folder": "3", "state": "finished", "step": 4, "loss": 2.3, "val_loss": 2.55, "reason": ""},
    }
    assert (last["tokens_per_second"], last["peak_memory_bytes"]) == (25.0, 4 << 30)
    assert last["overrides"] == ["train.seed=2", "strategy=[]"]
    rows = list(csv.DictReader(Path("runs/sweep/sweep.csv").read_text().splitlines()))
    assert [row["reason"] for row in rows] == [*reasons, ""]
    assert [row["val_loss"] for row in rows] == ["", "", "", "2.55"]
    assert [p.name for p in sorted(Path("runs").iterdir())] == ["sweep"]


@pytest.mark.slow
def test_options_apply_to_the_jobs_that_select_the_strategy(plait_project):
    ranks = Ranks()
    options = ("strategy.fsdp2.replicate=2", "strategy.fsdp2.shard=1")
    done = plait_project("train", "-m", "strategy=[fsdp2],[]", *options, *TINY, IN, ranks=ranks)
    assert (done.code, done.err) == (0, "")
    one, none = (each[3] for each in ranks.started)
    assert (one["fsdp2"]["replicate"], one["fsdp2"]["shard"], none) == (2, 1, {})
    meshes = [json.loads(Path(f"runs/sweep/{job}/mesh.json").read_text()) for job in (0, 1)]
    assert [mesh["world_size"] for mesh in meshes] == [2, 1]
    assert [(axis["name"], axis["degree"], axis["strategy"]) for axis in meshes[0]["dense"]] == [
        *(("dp_replicate", 2, "fsdp2"), ("dp_shard", 1, "fsdp2")),
    ]
    given = yaml.safe_load(Path("runs/sweep/multirun.yaml").read_text())["hydra"]["overrides"]["task"]
    assert set(options) <= set(given)


@pytest.mark.slow
def test_recipes_choose_strategies_and_may_hold_the_sweep(plait_project):
    ranks = Ranks()
    Path("conf/recipe").mkdir(parents=True)
    Path("conf/recipe/mine.yaml").write_text(
        "# @package _global_\nhydra:\n  sweeper:\n    params:\n"
        '      strategy: "[fsdp2],[]"\n      strategy.fsdp2.replicate: 1,2\n'
    )
    done = plait_project("train", "-m", "+recipe=mine", *TINY, IN, ranks=ranks)
    assert (done.code, done.err) == (0, "")
    assert record()[0]["overrides"] == ["strategy=[fsdp2]", "strategy.fsdp2.replicate=1"]
    done = plait_project("train", "-m", "+recipe=single,fsdp2", "strategy.fsdp2.replicate=2", *TINY, ranks=ranks)
    assert (done.code, done.err) == (0, "")
    assert [each[3].get("fsdp2", {}).get("replicate") for each in ranks.started] == [1, 2, None, None, 2]


@pytest.mark.parametrize(
    ("overrides", "key", "fits"),
    [
        ("strategy.fsdp2.replcate=1,2", "strategy.fsdp2.replcate", ("replicate",)),
        ("strategy.fsdp.shard=1", "strategy.fsdp", ("fsdp2",)),
        ("strategy.simplefsdp.shard=1", "strategy.simplefsdp", ("fsdp2",)),
        ("train.sead=1,2", "train.sead", ("seed",)),
        ("+recipe=fsdp2,sinle", "recipe", ("single",)),
    ],
)
def test_a_wrong_name_is_refused_before_the_first_job(plait_project, overrides, key, fits):
    ranks = Ranks()
    done = plait_project("train", "-m", "strategy=[fsdp2],[]", overrides, *TINY, ranks=ranks)
    assert (done.code, done.out, ranks.started) == (1, "", [])
    assert done.err.count("\n") == 1
    is_about(done.error, key, fits=fits)
    assert not Path("runs").exists() or not any(Path("runs").iterdir())


@pytest.mark.parametrize("path", ["../runs", "runs/../..", "runs/a\x07b", "runs/a\nb"])
@pytest.mark.parametrize("key", ["hydra.sweep.dir", "hydra.sweep.subdir"])
def test_folders_of_a_sweep_lead_nowhere_else(key, path):
    with raises_about(key, path, "a path without '..'"):
        check_sweep(path, key)


def test_the_folder_of_a_sweep_may_be_anywhere_but_those_of_its_jobs_are_in_it():
    check_sweep("/data/..runs/a", "hydra.sweep.dir")
    check_sweep("seed=1,lr=2/a", "hydra.sweep.subdir")
    with raises_about("hydra.sweep.subdir", "/data/a", "a folder inside hydra.sweep.dir"):
        check_sweep("/data/a", "hydra.sweep.subdir")


@pytest.mark.slow
def test_the_same_command_goes_on(plait_project):
    assert plait_project(*TWO, ranks=Ranks({1: PlaitError("once")})).code == 3
    folder = the_sweep()
    assert states(folder) == ["finished", "failed"]
    again = Ranks()
    done = plait_project("train", "-m", "hydra.verbose=false", *TWO[:1:-1], ranks=again)  # in whatever order
    assert done.code == 0
    assert the_sweep() == folder
    assert [each[:2] for each in again.started] == [("1", 2)]
    assert done.out.count(" is finished already\n") == 1
    assert states(folder) == ["finished"] * 2
    for more, started in (((), []), (("train.steps=5", f"hydra.sweep.dir={folder}"), ["0", "1"])):
        third = Ranks()
        assert plait_project(*TWO, *more, ranks=third).code == 0
        assert [each[0] for each in third.started] == started
    assert [job["step"] for job in record(folder)] == [5, 5]


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        (("train.seed=range(1,4)", "model=glob(gpt2_d*)"), 3),
        pytest.param(("train.seed=1,2,3", "train.seed=1,2"), 2, marks=pytest.mark.slow),  # the last counts
    ],
)
def test_a_job_says_of_how_many_it_is_and_which_is_best(plait_project, overrides, count):
    done = plait_project("train", "-m", "strategy=[]", *overrides, IN, ranks=Ranks())
    starts = [line for line in done.out.splitlines() if " starts: " in line]
    assert [line.partition(" starts: ")[2].partition(";")[0] for line in starts] == [
        f"{number} of {count}" for number in range(1, count + 1)
    ]
    assert [line.partition("best so far: ")[2].partition(" ")[0] for line in starts[1:]] == ["job"] * (count - 1)


def test_a_signal_stops_the_sweep_and_the_same_command_goes_on(plait_project):
    stop = Ranks({0: Outcome("stopped", "stopped by SIGTERM after step 2", step=2, signal=signal.SIGTERM)})
    done = plait_project(*TWO, IN, ranks=stop)
    assert done.code == 128 + signal.SIGTERM
    assert [(job["state"], job["reason"]) for job in record()] == [("stopped", "by SIGTERM")]
    assert done.out.endswith("sweep: 1 stopped; this table is runs/sweep/sweep.csv\n")
    path = Path("runs/sweep/sweep.json")
    path.write_text(path.read_text().replace('"stopped"', '"running"'))  # what SIGKILL leaves
    again = Ranks()
    assert plait_project(*TWO, IN, ranks=again).code == 0
    assert [each[0] for each in again.started] == ["0", "1"]
    assert states() == ["finished", "finished"]


@pytest.mark.slow
def test_what_comes_to_the_same_job_is_run_once(plait_project):
    ranks = Ranks()
    done = plait_project("train", "-m", "strategy=[]", "train.seed=1,1", *TINY, IN, ranks=ranks)
    assert (done.code, done.err) == (0, "")
    assert [each[0] for each in ranks.started] == ["0"]
    assert "plait: job 1 of the sweep (train.seed=1) is job 0 again\n" in done.out
    assert [job["job"] for job in record()] == [0]
    assert not Path("runs/sweep/1").exists()


@pytest.mark.slow
def test_another_job_takes_another_folder(plait_project):
    assert plait_project("train", "-m", "train.seed=choice(1)", *TINY, IN, ranks=Ranks()).code == 0
    other = Ranks()
    done = plait_project("train", "-m", "train.seed=2,1", *TINY, IN, ranks=other)
    assert done.code == 0
    assert [each[:2] for each in other.started] == [("0-2", 2)]
    assert sorted((job["job"], job["folder"]) for job in record()) == [(0, "0-2"), (1, "0")]
    assert not Path("runs/sweep/1").exists()
    assert done.out.endswith("sweep: 2 finished; this table is runs/sweep/sweep.csv\n")


def test_a_sweep_that_is_live_is_refused(plait_project):
    command = Command([])
    command.folder = "runs/sweep"
    command.hold()
    done = plait_project(*TWO, IN, ranks=Ranks())
    command.let_go()
    sentence = "the sweep in runs/sweep is already running; wait for it, or set another hydra.sweep.dir"
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"plait: {sentence}")
    assert not Path("runs/sweep").exists()


@pytest.mark.parametrize("make", [lambda path: path.write_text('{"jobs": [{"job"'), os.mkfifo], ids=["torn", "pipe"])
def test_a_damaged_record_is_one_sentence(plait_project, make):
    Path("runs/sweep").mkdir(parents=True)
    make(Path("runs/sweep/sweep.json"))
    done = plait_project(*TWO, IN, ranks=Ranks())
    assert done.code == 1
    assert done.err.startswith("plait: runs/sweep/sweep.json cannot be read (")
    assert "): move it away" in done.err
    assert done.err.count("\n") == 1


OPTUNA = (
    *("train", "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"),
    *("hydra.sweeper.sampler.seed=1", "optimizer.lr=tag(log,interval(1e-4,1e-2))", "train.seed=choice(1,2)"),
    *("strategy=[fsdp2]", "strategy.fsdp2.replicate=1", *TINY, IN),
)


@pytest.mark.slow
def test_a_search_minimises_the_validation_loss(plait_project):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    ranks = Ranks({0: PlaitError("made to fail")})
    done = plait_project(*OPTUNA, ranks=ranks)
    assert done.code == 3
    assert states() == ["failed", "finished"]
    best = yaml.safe_load(Path("runs/sweep/optimization_results.yaml").read_text())
    assert best["best_value"] == record()[1]["val_loss"]
    assert "Error executing job" not in done.err
    before = [job["overrides"] for job in record()]
    assert len(before[0]) == 2
    again = Ranks()
    assert plait_project(*OPTUNA, ranks=again).code == 0
    assert len(again.started) == 1
    assert record()[0]["overrides"] == before[0]


PRUNE = ("sweep.prune=true", "cluster=cpu", "cluster.memory=4e8", "train.seq_len=32", IN)


@pytest.mark.slow
def test_what_cannot_compose_or_does_not_fit_is_skipped(plait_project):
    ranks = Ranks()
    swept = ("strategy=[fsdp2],[fsdp2,simplefsdp]", "train.local_batch_size=2,2000")
    done = plait_project("train", "-m", *swept, *TINY, *PRUNE, ranks=ranks)
    assert (done.code, done.err) == (0, "")
    assert [each[0] for each in ranks.started] == ["0"]
    assert states() == ["finished", "pruned", "pruned", "pruned"]
    fits, full, *twice = record()
    assert re.fullmatch(
        r"does not fit cluster=.*: it needs [\d.]+ GiB per rank, and 0\.09 GiB can be used", full["reason"]
    )
    assert fits["planned_memory_bytes"] < 1e8 < full["planned_memory_bytes"]
    low, high = fits["planned_tokens_per_second"]
    assert 0 < low < high
    for job in twice:
        assert "'fsdp2' and 'simplefsdp' both claim the role" in job["reason"]
        assert f"plait: job {job['job']} of the sweep (" in done.out
    assert "sweep: 1 finished, 3 pruned; this table is runs/sweep/sweep.csv" in done.out


@pytest.mark.slow
def test_a_job_that_composes_and_cannot_be_planned_is_tried(plait_project, monkeypatch):
    def plan(*_):
        raise RuntimeError("a kernel needs a device")

    monkeypatch.setattr("plait_plan.engine.plan", plan)
    ranks = Ranks()
    done = plait_project("train", "-m", *TWO[2:], *PRUNE, ranks=ranks)
    assert (done.code, states()) == (0, ["finished", "finished"])
    assert done.out.count("this job cannot be planned, and is tried: RuntimeError: a kernel needs a device") == 2


def test_launchers_are_found(plait_project):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    done = plait_project("train", "--cfg", "hydra", "hydra/launcher=submitit_slurm", "hydra.launcher.gpus_per_node=8")
    launcher = yaml.safe_load(done.out)["hydra"]["launcher"]
    assert launcher["_target_"].endswith(".SlurmLauncher")
    assert launcher["gpus_per_node"] == 8


@pytest.mark.slow
def test_hydra_may_say_more(plait_project):
    """Then it composes the sweep several times, in a folder that the command itself holds."""
    ranks = Ranks()
    assert plait_project(*TWO, "hydra.verbose=true", ranks=ranks).code == 0
    assert len(ranks.started) == 2
