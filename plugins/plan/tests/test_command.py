"""`plait plan` as a command: its tables and JSON, its exit codes, several runs side by side, and what it refuses."""

import gc
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from plait.host import check, compose
from plait_plan import advice, engine, job
from plait_plan.commands import plan as command
from plait_plan.job import PlannedJob, Request
from plait_plan.side_by_side import Ranking, side_by_side
from tests.helpers.fakes import distribution, forget

TINY = [
    *("model.dim=32", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=64"),
    *("train.seq_len=32", "train.local_batch_size=2", "validation.interval=0"),
]
FSDP = ["strategy=[fsdp2]", "world=16"]
SMALL = ["cluster=h100", "cluster.reserved=79.9999e9"]  # leaves 100 kB


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    forget(tmp_path)


def test_tables_say_what_a_step_costs_and_draw_the_mesh(plait_project) -> None:
    done = plait_project("plan", *TINY, *FSDP, "strategy.fsdp2.replicate=2", "cluster=h100")
    assert done.code == 0, done.err
    for said in ("16 ranks, fsdp2", "rank 0, 2 of 2 blocks", "the peak is in ", "tokens/s"):
        assert said in done.out
    assert done.out.startswith("verdict  fits on NVIDIA H100"), "the first thing that one wants to know"
    drawing = done.out.split("ranks of the dense mesh\n")[1].split("\n\n")[0]
    assert [line.split() for line in drawing.splitlines()] == [
        ["dp_replicate", "dp_shard", "0", *map(str, range(1, 8))],
        ["0", *map(str, range(8)), "node", "0"],
        ["1", *map(str, range(8, 16)), "node", "1"],
    ]


def test_json_has_the_promised_keys_and_the_exit_code_says_that_it_does_not_fit(
    plait_project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "advise", lambda *run: advice.Advice([PlannedJob("a=1")], None))  # it plans many runs
    done = plait_project("plan", *TINY, *FSDP, *SMALL, "--json")
    assert done.code == 3, done.err
    found = json.loads(done.out)
    memory = found["memory"]
    for kind in ("parameters", "gradients", "optimizer", "activations", "peak"):
        assert isinstance(memory[kind], int)
        assert memory[kind] > 0
    assert memory["optimizer"] >= 2 * memory["parameters"]
    assert memory["peak"] == sum(memory["at"]["held"].values())
    low, high = found["time"]["step"]
    assert 0 < low <= high
    assert {"axis", "kind", "count", "bytes"} <= found["collectives"][0].keys()
    assert {c["kind"] for c in found["collectives"]} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert found["tokens"] == 16 * 2 * 32  # each rank has its own samples
    assert found["fits"] is False
    assert found["instead"] == [{"job": "a=1", "plan": None, "cost": None, "why": ""}]
    assert found["free"] == found["capacity"] - memory["peak"] < 0


@pytest.mark.slow
def test_several_runs_are_ranked_and_what_cannot_be_says_why(plait_project) -> None:
    swept = "strategy=[tensor_parallel,fsdp2],[fsdp2],[simplefsdp,fsdp2]"
    done = plait_project("plan", "-m", *TINY, swept, "world=2", "cluster=h100")
    assert done.code == 0, done.err
    first, second, third = done.out.splitlines()[1:]
    assert first.startswith("1  strategy=[fsdp2] ")
    assert second.startswith("2  strategy=[tensor_parallel,fsdp2] ")
    assert third.startswith("-  strategy=[simplefsdp,fsdp2] ")
    assert "both claim the role" in third

    done = plait_project("plan", "-m", *TINY, "strategy=[fsdp2]", "train.seq_len=32,64", "--json")
    assert done.code == 0, done.err
    jobs = json.loads(done.out)
    assert {job["job"] for job in jobs} == {"train.seq_len=32", "train.seq_len=64"}
    assert [(job["plan"]["fits"], job["plan"]["time"]) for job in jobs] == [(None, None)] * 2, "there is no cluster"
    assert plait_project("plan", "-m", *TINY, "strategy=[simplefsdp,fsdp2]", "train.seq_len=32,64").code == 1


STRATEGY = """
import attrs
import torch
from plait import hookimpl

@attrs.define
class Ghost:
    claims = ("gradient_sum",)

    @hookimpl
"""
NEEDS_A_DEVICE = "    def parallelize(self, model):\n        torch.ones(1, device='cuda')\n"
READS_A_VALUE = "    def after_step(self, model):\n        float(next(model.parameters()).detach().sum())\n"
READS_LATER = """    def parallelize(self, model):
        model.layers["0"].register_forward_pre_hook(look)

def look(module, given):
    if given[0].isnan().any():
        raise ValueError
"""
MODEL = """
from plait_models.llama3 import Llama3

class Looks(Llama3):
    def forward(self, tokens, positions=None):
        x = super().forward(tokens, positions)
        return x if x.sum() > 0 else -x
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (NEEDS_A_DEVICE, ["needs a real device", "strategy 'ghost' (plait-ghost 1.0) in its hook 'parallelize'"]),
        (READS_A_VALUE, ["reads the value of a tensor", "strategy 'ghost' (plait-ghost 1.0) in its hook 'after_step'"]),
        (READS_LATER, ["cannot plan strategy 'ghost' (plait-ghost 1.0), which reads the value of a tensor"]),
    ],
)
def test_a_strategy_that_cannot_be_planned_is_named(plait_project, site: Path, code: str, said: list[str]) -> None:
    distribution(site, "plait-ghost", code=textwrap.dedent(STRATEGY) + code)
    _refused(plait_project, [*TINY, "strategy=[ghost]"], "cannot plan", *said)


def test_a_model_that_cannot_be_traced_is_named(plait_project, site: Path) -> None:
    (site / "looks.py").write_text(MODEL)
    _refused(plait_project, [*TINY, "model._target_=looks.Looks"], "model looks.Looks", "reads the value of a tensor")
    assert "looks" in sys.modules


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["strategy=[tensor_parallel,fsdp2]", "strategy.tensor_parallel.degree=2", "world=3"], ["3 ranks", "tp=2"]),
        (["cluster=h1000"], ["cluster=h1000 does not exist", "a100, b200, cpu, h100", "did you mean 'h100'"]),
        (["cluster=h100", "cluster.bandwith=1"], ["unknown key cluster.bandwith", "did you mean 'bandwidth'"]),
        (["cluster=h100", "cluster.achieved.links=[0.9,0.1]"], ["cluster.achieved.links", "the lower one first"]),
        (["cluster=h100,cpu"], ["cluster=h100,cpu"]),
        (["strategy=[fsdp2]", "world=4", "rank=4"], ["rank=4", "ranks are 0 to 3"]),
        (["world=2,4"], ["world=2,4 are several values", "-m plans each"]),
        (["world=0"], ["world is '0'", "at least 1, such as world=4"]),
        (["price=2.5"], ["price= needs tokens=N"]),
        (["tokens=many"], ["tokens is 'many'", "such as tokens=1e12"]),
        (["tokens=1e9", "price=h100:0"], ["price is '0'", "price=h100:2.5"]),
        (
            ["tokens=1e9", "price=h100:2,a:3", "cluster=h200"],
            ["'h100:2,a:3'", "(price=h200:USD), or of any (price=USD)"],
        ),
        (["tokens=1e9", "price=h100:2"], ["price is 'h100:2'; it must be of a cluster that is planned, or of any"]),
        (["--smallest", "world"], ["--smallest needs to know the machines' memory: cluster=h100"]),
        (["--largest", "world", "cluster=h100"], ["use --smallest"]),
        (["--largest", "seq_len", "--smallest", "world"], ["exclude each other"]),
        (
            ["--smallest", "world=64", "cluster=h100"],
            ["--smallest takes the name of a key, such as train.seq_len; 'world=64' is a key with a value"],
        ),
        (["--largest", "strategy=[fsdp2]"], ["--largest takes the name of a key", "'strategy=[fsdp2]' is a key with"]),
        (
            ["--smallest", "wrold", "cluster=h100"],
            ["--smallest wrold: there is no key train.wrold; such as world, train.seq_len", "did you mean 'world'?"],
        ),
        (["--largest", "trian.seq_len", "cluster=h100"], ["no key trian.seq_len", "did you mean 'train'?"]),
        (["--largest", "train.seqlen", "cluster=h100"], ["no key train.seqlen", "did you mean 'seq_len'?"]),
        (["--largest", "train.ramp", "cluster=h100"], ["--largest train.ramp: the run has no whole number there"]),
        (["--largest", "model.layers", "cluster=h100"], ["--largest model.layers: the run has no whole number there"]),
        (["--largest", "train.speed", "cluster=h100"], ["--largest train.speed", "such as world, train.seq_len"]),
        (["rank=first"], ["rank is 'first'", "such as rank=0"]),
        (["compile.enabled=true", "remat.mode=budget"], ["remat.mode=budget", "full or selective"]),
        (["--jason"], ["--jason"]),
    ],
)
def test_bad_input_is_one_sentence_that_names_it(plait_project, wrong: list[str], said: list[str]) -> None:
    _refused(plait_project, [*TINY, *wrong], *said)


def test_without_machines_tokens_and_prices_say_what_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    said = "only if the machines are named, such as cluster=h100"
    for given, what in (({"price": {"": 2.5}}, "tokens= and price= tell days and money"), ({}, "tokens= tells days")):
        args: Any = SimpleNamespace(**{"tokens": 1e12, "price": None, **given})
        command._told_without_time(args, True)
        assert capsys.readouterr().err == f"plait: {what} {said}\n"
        command._told_without_time(args, False)
        assert capsys.readouterr().err == ""


def test_a_cluster_without_a_price_is_named(plait_project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "planned", lambda request, label: PlannedJob(label, why="not planned"))
    done = plait_project("plan", "-m", *TINY, "cluster=h100,h200", "tokens=1e9", "price=h100:2")
    assert done.err == "plait: price= has none of cluster=h200, so its dollars are not told\n"
    assert not plait_project("plan", "-m", *TINY, "cluster=h100,h200", "tokens=1e9", "price=h100:2,h200:3").err


def _refused(plait_project, arguments: list[str], *said: str) -> None:
    done = plait_project("plan", *arguments)
    assert done.code == 1, done.out
    assert len([line for line in done.err.splitlines() if line.startswith("plait: ")]) == 1
    for each in said:
        assert each in done.err


def test_a_plan_notes_what_strategies_say_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*arguments: object) -> object:
        return attrs.evolve(check(*arguments), said=[("a line", "all of its details"), ("only a line", "")])

    monkeypatch.setattr(engine, "check", said)
    found = engine.plan(compose(["strategy=[]", *TINY]), 1)
    assert found.notes == ["all of its details", "only a line"]


def test_what_a_plan_makes_is_seldom_looked_through_for_garbage_and_what_follows_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(command, "_one", lambda args: seen.append(gc.get_threshold()) or 0)
    before = gc.get_threshold()
    args: Any = SimpleNamespace(
        smallest=None, largest=None, price=None, tokens=None, world=None, multirun=False, routing="even"
    )
    assert command.run(args) == 0
    assert seen == [command.SELDOM] != [before]
    assert gc.get_threshold() == before


def test_a_table_of_runs_has_the_speed_of_those_whose_time_is_known() -> None:
    time = SimpleNamespace(step=(0.5, 1.0), tokens_per_second=(2048.0, 4096.0), bound="memory bandwidth")
    memory = SimpleNamespace(peak=2 * 10**9)
    timed, plain = (SimpleNamespace(time=t, memory=memory, fits=t and True, free=0, tokens=64) for t in (time, None))
    jobs = [PlannedJob("a=1", timed), PlannedJob("a=2", plain), PlannedJob("a=3", why="it cannot run")]
    shown = Ranking(jobs).text().splitlines()
    for said in ("1", "a=1", "0.500 to 1.000 s", "2,048 to 4,096", "bound by memory bandwidth"):
        assert said in shown[-3]
    assert "a=2" in shown[-2]
    assert " to " not in shown[-2]
    assert shown[-1].startswith("-")
    assert shown[-1].endswith("it cannot run")


def test_runs_without_a_price_come_after_those_with_one() -> None:
    """Seconds are not to be compared with dollars."""
    memory, time = SimpleNamespace(peak=1), SimpleNamespace(step=(1.0, 2.0))
    plan = SimpleNamespace(time=time, memory=memory, fits=True, tokens=64)
    costs = {"cheap": (5.0, 10.0), "free": None, "dear": (10.0, 20.0)}
    made = iter([PlannedJob(label, plan, cost=SimpleNamespace(dollars=span)) for label, span in costs.items()])
    ranked = side_by_side([(label, Request([])) for label in costs], lambda request, label: next(made))
    assert [job.label for job in ranked.jobs] == ["cheap", "dear", "free"]


def test_one_run_that_fits_is_enough() -> None:
    fits, full = (PlannedJob(str(fits), SimpleNamespace(fits=fits)) for fits in (True, False))
    assert Ranking([fits, full]).code == 0
    assert Ranking([full, full]).code == 3
