"""A plan's file: what it must say, and for whom it is."""

import pytest
import yaml

from plait import PlaitError
from plait.contract.config import Config
from plait_autoparallel import file

BLOCKS = ["layers.0", "layers.1"]
GOOD = {
    "version": 1,
    "run": {"model": "m", "parameters": 10, "world": 2},
    "decision": {
        "strategies": {"fsdp2": {"shard": 2}},
        "local_batch_size": 4,
        "global_batch_size": 8,
        "recompute": {"layers.*": "full"},
    },
}


class Run:
    config, parameters, world_size = Config(model={"_target_": "m"}), 10, 2


def read(tmp_path, node):
    path = tmp_path / "plan.yaml"
    path.write_text(node if isinstance(node, str) else yaml.safe_dump(node))
    return file.read(path, Run, BLOCKS)


def test_what_is_written_is_read(tmp_path):
    found = read(tmp_path, GOOD)
    assert found == file.Decision({"fsdp2": {"shard": 2}}, 4, 8, {"layers.*": "full"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "has version 2; this plait-autoparallel reads version 1"),
        ({"run": {"model": "other"}}, "is for model other, but this run has m; set strategy.autoparallel.plan=null"),
        ({"run": {"world": 4}}, "is for world 4, but this run has 2"),
        ({"run": {"parameters": 11}}, "is for parameters 11, but this run has 10"),
        ({"decision": None}, "has no `decision`"),
        ({"decision": {"strategies": ["fsdp2"]}}, "decision.strategies must map names of strategies"),
        (
            {"decision": {**GOOD["decision"], "local_batch_size": 0}},
            "decision.local_batch_size is 0; it must be a whole",
        ),
        ({"decision": {**GOOD["decision"], "recompute": {"layers.0": "some"}}}, "must map blocks to none, full, selec"),
        ({"decision": {**GOOD["decision"], "recompute": {"layers.7": "full"}}}, "names 'layers.7', which is no block"),
    ],
)
def test_what_does_not_fit_is_a_sentence(tmp_path, change, said):
    with pytest.raises(PlaitError) as error:
        read(tmp_path, {**GOOD, **change})
    assert said in str(error.value)


@pytest.mark.parametrize(("text", "said"), [("a: [", "it is not YAML"), ("just text", "has no `version`")])
def test_what_is_no_plan_is_a_sentence(tmp_path, text, said):
    with pytest.raises(PlaitError, match=said):
        read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(PlaitError, match="cannot be read: No such file"):
        file.read(tmp_path / "none.yaml", Run, BLOCKS)
