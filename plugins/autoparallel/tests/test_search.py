"""Whole searches, by `check`, as `plait train` and `plait plan` make them: tiny models, two strategies."""

import pytest
import yaml

from plait import PlaitError
from plait.launch.check import check
from plait.launch.compose import resolve
from plait.strategies.registry import installed

TINY = (
    "strategy=[autoparallel]", "strategy.autoparallel.strategies=[fsdp2]", "cluster=cpu",
    "model.dim=32", "model.n_layers=5", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=64",
    "train.seq_len=64", "train.local_batch_size=8", "validation.interval=0", "metrics.tensorboard=false",
    "launch.device=cpu",
)  # fmt: skip


def checked(*more, world=2, folder=None):
    return check(resolve([*TINY, *more]), world, folder)


@pytest.fixture(scope="module")
def found():
    return checked()


def test_the_run_is_configured_as_if_a_person_had(found):
    plan = yaml.safe_load(found.files["plan.yaml"])
    decision = plan["decision"]
    assert plan["run"] == {"model": "plait.models.llama3.Llama3", "parameters": plan["run"]["parameters"], "world": 2}
    assert found.node["strategy"].keys() == {"autoparallel", *decision["strategies"]}
    assert found.node["train"]["global_batch_size"] == 16
    assert found.node["train"]["local_batch_size"] == decision["local_batch_size"]
    assert list(decision["recompute"]) == [f"layers.{i}" for i in range(5)]
    assert decision["axes"] in ({"dp_shard": 2}, {"dp_replicate": 2})
    assert found.layout.world_size == 2
    assert plan["bytes"]["peak"] <= plan["bytes"]["limit"]
    (line, details), *_ = found.said
    assert line.startswith("autoparallel: dp_")
    assert "chosen" in details


def test_the_same_search_writes_the_same_bytes(found):
    assert checked().files == found.files


def test_a_resumed_run_keeps_its_plan_and_another_world_does_not(found, tmp_path):
    edited = yaml.safe_load(found.files["plan.yaml"])
    edited["decision"]["recompute"] = {"layers.0": "full"}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(edited))
    again = checked(folder=tmp_path)
    assert again.node["remat"]["blocks"] == {"layers.0": "full"}
    assert again.said == [(f"autoparallel: follows the plan {tmp_path / 'plan.yaml'}", "")]
    one = checked(world=1, folder=tmp_path)
    assert one.node["train"]["global_batch_size"] == 16  # as before, so that the run takes the same steps
    assert yaml.safe_load(one.files["plan.yaml"])["run"]["world"] == 1


def test_less_memory_recomputes_and_too_little_is_a_sentence(found):
    plan = yaml.safe_load(found.files["plan.yaml"])
    needed = plan["bytes"]["peak"]
    less = yaml.safe_load(checked(f"strategy.autoparallel.memory={needed * 0.9:.0f}").files["plan.yaml"])
    assert less["bytes"]["peak"] <= 0.9 * needed
    assert less["seconds"]["step"] > plan["seconds"]["step"]
    with pytest.raises(PlaitError, match=r"no plan fits 1.00 KiB per rank: the one that needs least, .* needs .* more"):
        checked("strategy.autoparallel.memory=1024")


def test_axes_and_ways_can_be_fixed():
    one = checked(
        "strategy.autoparallel.axes={dp_shard: 2}",
        "strategy.autoparallel.require={layers.0: full}",
        "strategy.autoparallel.forbid={layers.1: [none]}",
    )
    decision = yaml.safe_load(one.files["plan.yaml"])["decision"]
    assert decision["axes"] == {"dp_shard": 2}
    assert decision["recompute"]["layers.0"] == "full"
    assert decision["recompute"]["layers.1"] != "none"


@pytest.mark.skipif("ddp" not in installed(), reason="the example is not installed")
def test_a_third_partys_strategy_joins_by_its_hook():
    one = checked("strategy.autoparallel.strategies=[ddp]")
    decision = yaml.safe_load(one.files["plan.yaml"])["decision"]
    assert decision["strategies"] == {"ddp": {"degree": 2}}
    assert one.layout.count("batch") == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("strategy.autoparallel.axes={tp: 2}", "axes names 'tp', but no layout of 2 ranks has that axis"),
        ("strategy.autoparallel.axes={dp_shard: 3}", "axes.dp_shard=3 fits no layout of 2 ranks; dp_shard can be 1, 2"),
        ("strategy.autoparallel.axes={dp_shard: 0}", "gives dp_shard the degree 0"),
        ("strategy.autoparallel.require={layerz.*: full}", "names 'layerz.*', which is neither a logical axis (embed"),
        (
            "strategy.autoparallel.require={layers.*: some}",
            "require.layers.*=some is no choice there; there are none, ",
        ),
        ("strategy.autoparallel.forbid={vocab: tp}", "forbid.vocab=tp is no choice there; there are dp_replicate, dp_"),
        ("strategy.autoparallel.strategies=[ghost]", "names 'ghost', which is not installed or offers no choices"),
        ("strategy.autoparallel.memory=-1", "strategy.autoparallel.memory must be > 0"),
        ("train.global_batch_size=3", "a step's 3 samples (train.global_batch_size) divide over no layout"),
        ("strategy.autoparallel.plan=/no/plan.yaml", "the plan /no/plan.yaml cannot be read: No such file"),
    ],
)
def test_what_does_not_fit_is_a_sentence(override, said):
    with pytest.raises(PlaitError) as error:
        checked(override)
    assert said in str(error.value)
