"""Options that do not fit, and the report that a run leaves."""

import json
from types import SimpleNamespace

import pytest

from plait.host import check, compose
from plait.testing import raises_about
from plait_simplefsdp.report import Report
from plait_testing import whole_run

ASK = ["strategy=[simplefsdp]", "launch.device=cpu"]
EAGER = "compile.enabled=true compile.backend=eager"
PASSES = "strategy.simplefsdp.passes"
WRONG = [
    (f"{PASSES}=[bucket_blocks]", (PASSES, ["bucket_blocks"], "bucket_block, bucket_auto, reorder, memory")),
    (f"{PASSES}=[bucket_block,bucket_auto]", (PASSES, ["bucket_block", "bucket_auto"])),
    (f"{PASSES}=[reorder,reorder]", (PASSES, ["reorder", "reorder"])),
    (f"{PASSES}=[bucket_auto,memory]", (PASSES, ["bucket_auto", "memory"])),
    (
        "strategy.simplefsdp.reshard_after_forward=sometimes",
        ("strategy.simplefsdp.reshard_after_forward", "sometimes", ("default", "always", "never")),
    ),
    ("strategy.simplefsdp.shard=0", ("strategy.simplefsdp.shard", 0, "at least 1, or -1 for what is left")),
    ("strategy.simplefsdp.replicate=0", ("strategy.simplefsdp.replicate", 0, "at least 1, or -1 for what is left")),
    (EAGER, ("compile.backend", "eager", ("aot_eager", "inductor"))),
    ("compile.enabled=true remat.blocks={layers.0:full}", ("compile.enabled", True, (False,))),
    ("remat.mode=budget", ("remat.mode", "budget", ("none", "selective", "full"))),
    ("remat.budget=0", ("remat.budget", 0.0, "> 0")),
]


@pytest.mark.parametrize(("override", "about"), WRONG)
def test_said_before_a_rank_starts(override, about):
    with raises_about(*about):
        check(compose([*ASK, *override.split()]))


def test_it_and_fsdp2_exclude_each_other():
    pytest.importorskip("plait_fsdp2")
    with raises_about("strategy", ("simplefsdp", "fsdp2")):
        check(compose(["strategy=[simplefsdp,fsdp2]", "launch.device=cpu"]))


def test_a_report_is_a_file_and_lines_of_the_log(tmp_path, monkeypatch, caplog):
    counts = {"all_gather": {"count": 9, "bytes": 2**20}}
    state = {"collectives": counts, "communication_ms": 2.0, "exposed_ms": 1.5, "bound_ms": 0.5, "peak_bytes": 2**21}
    bucket = {"kind": "all_gather", "blocks": ["layers.0"], "parameters": 9, "bytes": 2**20, "node": "wait"}
    found = {"graph": "forward", "machine": "cpu", "before": state, "after": {**state, "exposed_ms": 1.0},
             "buckets": [bucket], "moved": {"a": "b"}, "held_back": []}  # fmt: skip
    for rank in (0, 1):
        monkeypatch.setattr("plait_simplefsdp.report.dist.get_rank", lambda rank=rank: rank)
        (tmp_path / str(rank)).mkdir()
        report = Report(SimpleNamespace(folder=tmp_path / str(rank)))
        with caplog.at_level("INFO", "plait"):
            report.add(found)
            report.add({**found, "graph": "backward"})
    assert json.loads((tmp_path / "0" / "passes.json").read_text()) == {
        "graphs": [found, {**found, "graph": "backward"}]
    }
    assert not list((tmp_path / "1").iterdir())
    assert caplog.text.count("the backward graph before and after its passes; estimates are for cpu") == 1
    assert "1.50 -> 1.00" in caplog.text


@pytest.mark.slow
def test_a_run_says_what_its_passes_did(tmp_path):
    arguments = whole_run.overrides({"simplefsdp": {}}, tmp_path, 2, "run.name=a", "compile.enabled=true",
                               "compile.backend=aot_eager", "train.steps=4")  # fmt: skip
    process = whole_run.start(arguments, tmp_path)
    output = process.communicate(timeout=250)[0]
    assert process.returncode == 0, output
    found = json.loads((tmp_path / "runs" / "a" / "passes.json").read_text())["graphs"]
    assert [graph["graph"] for graph in found] == ["forward", "backward", "inference"]
    for graph in found:
        before, after = graph["before"], graph["after"]
        assert after["collectives"]["all_gather"]["count"] < before["collectives"]["all_gather"]["count"]
        assert 0 <= after["bound_ms"] <= after["exposed_ms"] < before["exposed_ms"]
        assert graph["buckets"][0].keys() == {"node", "kind", "blocks", "parameters", "bytes"}
    log = (tmp_path / "runs" / "a" / "ranks" / "rank-0.log").read_text()
    assert "simplefsdp: the backward graph before and after its passes" in log
