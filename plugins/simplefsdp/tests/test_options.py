"""Options that do not fit, and the report that a run leaves."""

import json
import re

import pytest

from plait import PlaitError
from plait.launch.check import check
from plait.launch.compose import resolve
from plait.testing import whole_run

ASK = ["strategy=[simplefsdp]", "launch.device=cpu"]
EAGER = "compile.enabled=true compile.backend=eager"
WRONG = [
    ("strategy.simplefsdp.passes=[bucket_blocks]", "passes knows bucket_block, bucket_auto, reorder, memory, not"),
    ("strategy.simplefsdp.passes=[bucket_block,bucket_auto]", "takes bucket_block or bucket_auto, not both"),
    ("strategy.simplefsdp.passes=[reorder,reorder]", "names one twice"),
    ("strategy.simplefsdp.passes=[bucket_auto,memory]", "memory holds back what reorder moved"),
    ("strategy.simplefsdp.reshard_after_forward=sometimes", "must be in ('default', 'always', 'never')"),
    ("strategy.simplefsdp.shard=0", "shard must be at least 1, or -1 for what is left: 0"),
    (EAGER, "compile.backend=eager gives simplefsdp no graph to plan; take aot_eager or inductor"),
    ("compile.enabled=true remat.blocks={layers.0:full}", "remat.blocks lets blocks recompute differently, but with"),
    ("remat.mode=budget", "remat.mode=budget is kept by a compiler that divides graphs, but compile.enabled=False"),
    ("remat.budget=0", "remat.budget must be > 0"),
]


@pytest.mark.parametrize(("override", "says"), WRONG)
def test_said_before_a_rank_starts(override, says):
    with pytest.raises(PlaitError, match=re.escape(says)) as caught:
        check(resolve([*ASK, *override.split()]))
    assert len(str(caught.value).splitlines()) == 1


def test_it_and_fsdp2_exclude_each_other():
    pytest.importorskip("plait_fsdp2")
    with pytest.raises(PlaitError, match="strategies 'simplefsdp' and 'fsdp2' both claim the role"):
        check(resolve(["strategy=[simplefsdp,fsdp2]", "launch.device=cpu"]))


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
