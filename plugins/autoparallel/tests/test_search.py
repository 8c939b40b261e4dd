"""Whole searches, by `check`, as `plait train` and `plait plan` make them: tiny models, two strategies."""

import pytest
import yaml

from plait import PlaitError, planning
from plait.host import check, compose
from plait.strategies.registry import installed
from plait.testing import raises_about

TINY = (
    "strategy=[autoparallel]", "strategy.autoparallel.strategies=[fsdp2]", "cluster=cpu",
    "model.dim=32", "model.n_layers=5", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=64",
    "train.seq_len=64", "train.local_batch_size=8", "validation.interval=0", "metrics.tensorboard=false",
    "launch.device=cpu",
)  # fmt: skip


def checked(*more, world=2, folder=None):
    return check(compose([*TINY, *more]), world, folder)


@pytest.fixture(scope="module")
def found():
    return checked()


def test_the_run_is_configured_as_if_a_person_had(found):
    plan = yaml.safe_load(found.files["plan.yaml"])
    decision = plan["decision"]
    assert plan["run"] == {"model": "plait_models.llama3.Llama3", "parameters": plan["run"]["parameters"], "world": 2}
    assert found.config.strategy.keys() == {"autoparallel", *decision["strategies"]}
    assert found.config.train.global_batch_size == 16
    assert found.config.train.local_batch_size == decision["local_batch_size"]
    assert list(decision["recompute"]) == [f"layers.{i}" for i in range(5)]
    assert plan["axes"] in ({"dp_shard": 2}, {"dp_replicate": 2})
    assert found.layout.world_size == 2
    assert plan["bytes"]["peak"] <= plan["bytes"]["limit"]
    (line, details), *_ = found.said
    assert line.startswith("autoparallel: dp_")
    assert "chosen" in details
    assert "further strategies could save that" in details
    assert "those in this search do not divide embed, ffn, heads, kv_heads, vocab" in details


@pytest.mark.slow
def test_the_same_search_writes_the_same_bytes(found):
    assert checked().files == found.files


def test_a_resumed_run_keeps_its_plan_and_another_world_does_not(found, tmp_path):
    edited = yaml.safe_load(found.files["plan.yaml"])
    edited["decision"]["recompute"] = {"layers.0": "full"}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(edited))
    again = checked(folder=tmp_path)
    assert again.config.remat.blocks == {"layers.0": "full"}
    assert again.said == [(f"autoparallel: follows the plan {tmp_path / 'plan.yaml'}", "")]
    one = checked(world=1, folder=tmp_path)
    assert one.config.train.global_batch_size == 16  # as before, so that the run takes the same steps
    assert yaml.safe_load(one.files["plan.yaml"])["run"]["world"] == 1


def test_an_elastic_run_has_a_plan_for_each_number_of_machines(tmp_path):
    """All for one batch. A start of the ranks follows that of its number, whether it is in the folder yet or not."""
    elastic = ["launch.nnodes='1:2'", "launch.nproc_per_node=1", "launch.rdzv_endpoint=here:29500"]
    found = checked(*elastic, world=None, folder=tmp_path)
    assert found.machines == (1, 2)
    plans = {name: yaml.safe_load(text) for name, text in found.files.items()}
    assert {name: plan["run"]["world"] for name, plan in plans.items()} == {"plan-1.yaml": 1, "plan-2.yaml": 2}
    assert [plan["decision"]["global_batch_size"] for plan in plans.values()] == [16, 16]
    assert len([line for line, _ in found.said if line.startswith("autoparallel: ")]) == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_WORLD_SIZE", "1")
        patch.setattr("plait_autoparallel.decide._search", None)
        alone = check(compose([*TINY, *elastic]), 1, tmp_path, found.files)
        assert alone.said == [("autoparallel: follows the plan plan-1.yaml", "")]
        assert (alone.config.train.global_batch_size, alone.files) == (16, found.files)
        for name, text in found.files.items():
            (tmp_path / name).write_text(text)
        assert checked(*elastic, world=None, folder=tmp_path).machines == (1, 2)
        ((line, _),) = check(compose([*TINY, *elastic]), 1, tmp_path, found.files).said
        assert line == f"autoparallel: follows the plan {tmp_path / 'plan-1.yaml'}"


def test_machines_too_few_for_any_plan_would_be_spares(tmp_path):
    elastic = ["launch.nnodes='1:2'", "launch.nproc_per_node=1", "launch.rdzv_endpoint=here:29500"]
    less = checked(*elastic, "strategy.autoparallel.axes={dp_shard: 2}", world=None, folder=tmp_path)
    assert less.machines == (2,)
    assert any(line.startswith("launch: 1 machine would not train: ") for line, _ in less.said)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("train.global_batch_size=4", marks=pytest.mark.slow),
        "strategy.autoparallel.axes={dp_replicate: 2}",
    ],
)
def test_a_resumed_run_searches_again_for_another_batch_or_constraint(found, tmp_path, more):
    (tmp_path / "plan.yaml").write_text(found.files["plan.yaml"])
    plan = yaml.safe_load(checked(more, folder=tmp_path).files["plan.yaml"])
    assert plan["decision"]["global_batch_size"] == (4 if "batch" in more else 16)
    assert plan["asked"] == ({"strategies": ["fsdp2"]} | ({} if "batch" in more else {"axes": {"dp_replicate": 2}}))


def test_a_given_plan_is_for_its_batch_and_leaves_no_constraint_unmentioned(found, tmp_path):
    file = tmp_path / "given.yaml"
    file.write_text(found.files["plan.yaml"])
    with raises_about("train.global_batch_size", 4, (16,)):
        checked(f"strategy.autoparallel.plan={file}", "train.global_batch_size=4")
    ((line, _),) = checked(f"strategy.autoparallel.plan={file}", "strategy.autoparallel.axes={tp: 2}").said
    assert "not used, because nothing is searched: strategy.autoparallel.axes" in line


def test_less_memory_recomputes_and_too_little_is_a_sentence(found):
    plan = yaml.safe_load(found.files["plan.yaml"])
    needed = plan["bytes"]["peak"]
    less = yaml.safe_load(checked(f"strategy.autoparallel.memory={needed * 0.9:.0f}").files["plan.yaml"])
    assert less["bytes"]["peak"] <= 0.9 * needed
    assert less["seconds"]["step"] > plan["seconds"]["step"]
    assert plan["bound"].startswith("time")
    assert less["bound"].startswith("memory: with enough of it, a step would take ")
    with raises_about("strategy.autoparallel.memory", 1024.0, "at least"):
        checked("strategy.autoparallel.memory=1024")


def least(*more):
    """Bytes that the smallest plan needs."""
    with pytest.raises(PlaitError) as caught:
        checked("strategy.autoparallel.memory=1024", *more)
    return float(caught.value.fits.split()[2])


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        ("require={layers.*: none}", "strategy.autoparallel.require.layers.*=none"),
        pytest.param(
            *("forbid={layers.*: [selective, full]}", "strategy.autoparallel.forbid.layers.*=[selective,full]"),
            marks=pytest.mark.slow,
        ),
        pytest.param("axes={dp_replicate: 2}", "strategy.autoparallel.axes.dp_replicate=2", marks=pytest.mark.slow),
    ],
)
def test_without_a_plan_the_constraint_that_helps_is_named(constraint, said):
    constraint = f"strategy.autoparallel.{constraint}"
    memory = (least() + least(constraint)) / 2
    with pytest.raises(PlaitError) as caught:
        checked(f"strategy.autoparallel.memory={memory:.0f}", constraint)
    assert caught.value.key == "strategy.autoparallel.memory"
    assert (
        str(caught.value).count(" there is a plan: ")
        == str(caught.value).count(f"without {said} there is a plan: ")
        == 1
    )


@pytest.mark.parametrize(
    ("pattern", "key", "value"), [("layers.0", "require.layers.0", "full"), ("layers.*", "require", "layers.0")]
)
def test_what_is_required_and_forbidden_is_refused_before_anything_is_traced(monkeypatch, pattern, key, value):
    monkeypatch.setattr(planning, "traces", None)
    with raises_about(f"strategy.autoparallel.{key}", value):
        checked("strategy.autoparallel.require={layers.0: full}", f"strategy.autoparallel.forbid={{{pattern}: [full]}}")


@pytest.mark.slow
def test_a_plan_that_needs_more_as_a_whole_is_searched_again(found, monkeypatch):
    """The search adds up pieces; what a trace of the plan needs beyond that is taken off its limit."""
    needed = yaml.safe_load(found.files["plan.yaml"])["bytes"]["peak"]
    plain, asked = planning.needs, []

    def needs(*run):
        asked.append(1.1 * plain(*run))
        return asked[-1]

    monkeypatch.setattr(planning, "needs", needs)
    less = yaml.safe_load(checked(f"strategy.autoparallel.memory={needed}").files["plan.yaml"])
    assert len(asked) > 1
    assert less["bytes"]["peak"] * asked[-1] <= needed


def test_axes_and_ways_can_be_fixed():
    one = checked(
        "strategy.autoparallel.axes={dp_shard: 2}",
        "strategy.autoparallel.require={layers.0: full}",
        "strategy.autoparallel.forbid={layers.1: [none]}",
    )
    plan = yaml.safe_load(one.files["plan.yaml"])
    decision = plan["decision"]
    assert plan["axes"] == {"dp_shard": 2}
    assert plan["asked"].keys() == {"strategies", "axes", "require", "forbid"}
    assert decision["recompute"]["layers.0"] == "full"
    assert decision["recompute"]["layers.1"] != "none"


@pytest.mark.skipif("ddp" not in installed(), reason="the example is not installed")
def test_a_third_partys_strategy_joins_by_its_hook():
    one = checked("strategy.autoparallel.strategies=[ddp]")
    decision = yaml.safe_load(one.files["plan.yaml"])["decision"]
    assert decision["strategies"] == {"ddp": {"degree": 2}}
    assert one.layout.count("batch") == 2


GLANCES = """
from plait_models.llama3 import Llama3

class Glances(Llama3):
    def forward(self, tokens, positions=None):
        x = super().forward(tokens, positions)
        return x if x.sum() > 0 else -x
"""


@pytest.mark.slow
def test_a_model_that_cannot_be_traced_is_named(tmp_path, monkeypatch):
    (tmp_path / "glances.py").write_text(GLANCES)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PlaitError, match=r"model glances.Glances.* reads the value of a tensor"):
        checked("model._target_=glances.Glances")


@pytest.mark.parametrize(
    ("override", "about"),
    [
        ("axes={tp: 2}", ("axes", "tp", ("dp_shard",))),
        ("axes={dp_shard: 3}", ("axes.dp_shard", 3, (1, 2))),
        ("axes={dp_shard: 0}", ("axes", {"dp_shard": 0}, "a whole number of at least 1")),
        ("require={layerz.*: full}", ("require", "layerz.*", ("embed",))),
        ("require={layers.*: [full, 3]}", ("require", {"layers.*": ["full", 3]}, "a name or a list of names")),
        ("require={layers.*: some}", ("require.layers.*", "some", ("none",))),
        ("require={vocab: dp_replicate}", ("require", {"vocab": ("dp_replicate",)})),
        ("forbid={vocab: tp}", ("forbid.vocab", "tp", ("dp_replicate", "dp_shard"))),
        ("strategies=[ghost]", ("strategies", "ghost", ("fsdp2",))),
        ("memory=-1", ("memory", -1, "> 0")),
        ("plan=/no/plan.yaml", ("plan",)),
    ],
)
def test_what_does_not_fit_names_the_key(override, about):
    with raises_about(f"strategy.autoparallel.{about[0]}", *about[1:]):
        checked(f"strategy.autoparallel.{override}")


def test_a_batch_that_no_layout_can_share_names_the_key():
    with raises_about("train.global_batch_size", 3):
        checked("train.global_batch_size=3")
