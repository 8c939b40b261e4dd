"""An optimizer knows what it updates, and some parameters have options of their own."""

import functools
import sys
from typing import Any

import cloudpickle
import pytest
import torch

from plait.contract.config import Schedule
from plait.contract.errors import PlaitError
from plait.parallel.optimizer_groups import groups_of
from plait.testing import Trial, raises_about, take_step
from plait.train.optimizer import make_optimizer
from plait.train.optimizer_options import check_optimizer, state_keys
from plait.train.option_groups import is_vector
from plait_testing import whole_run
from plait_testing.models import llama3
from tests.helpers.keepers import parameters

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.5}
BY_AXES = {"_target_": "tests.helpers.keepers.ByAxes", "lr": 0.1}
ALL = {**ADAMW, "decays": "all"}
PATTERNS: dict[str, dict[str, Any]] = {
    "norm.weight": {"weight_decay": 0.0},
    "layers.*.attention_norm.weight": {"weight_decay": 0.0, "lr": 0.2},
    "*.weight": {"lr": 0.01},
}


def described(strategies):
    """Of each group: its mesh's axes, and of each parameter its name, logical axes, block and number of dims."""
    found = []
    for group in Trial().apply(strategies).groups():
        beside = (group[key] for key in ("names", "logical", "block"))
        params = [*zip(*beside, [p.dim() for p in group["params"]], strict=True)]
        found.append((group["mesh"] and group["mesh"].mesh_dim_names, params))
    return found


@pytest.mark.parametrize(
    ("strategies", "meshes"),
    [({"fsdp2": {}}, [("dp_shard",)]), ({"tensor_parallel": {}}, [("tp",)]), ({"pipeline": {}}, [None])],
)
def test_a_group_per_mesh_says_what_its_parameters_are(plait_ranks, strategies, meshes):
    model, seen = llama3(), set()
    spec = model.spec()
    for groups in plait_ranks.run(described, strategies, world=2):
        assert sorted([mesh for mesh, _ in groups], key=bool) == meshes
        for _, params in groups:
            for name, logical, block, dims in params:
                assert logical == spec.axes_of(name)
                assert len(logical) == dims
                assert block == (".".join(name.split(".")[:2]) if name.startswith("layers.") else None)
                seen.add(name)
    assert seen == {name for name, _ in model.named_parameters()}


def trained(node):
    """(the groups' options by name, FQN -> how far it went in one step), of a model that AdamW trains."""
    trial = Trial(steps=1)
    applied = trial.apply({})
    optimizer = applied.optimizer(lambda groups: make_optimizer(node, groups))
    before = {name: p.detach().clone() for name, p in applied.parts[0].named_parameters()}
    take_step(applied, optimizer, trial, 0)
    went = {name: (p.detach() - before[name]).abs().max().item() for name, p in applied.parts[0].named_parameters()}
    options = {
        name: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for name in group["names"]
    }
    return options, went


def test_the_first_pattern_counts(plait_ranks):
    ((options, went),) = plait_ranks.run(trained, {**ADAMW, "groups": PATTERNS}, world=1)
    assert options["norm.weight"] == (0.1, 0.0)
    assert options["layers.1.attention_norm.weight"] == (0.2, 0.0)
    assert options["output.weight"] == (0.01, 0.5)
    assert options["layers.0.feed_forward.w1.weight"] == (0.1, 0.5)
    assert went["layers.1.attention_norm.weight"] == pytest.approx(0.2, rel=1e-3)  # the first step of Adam
    assert went["norm.weight"] == pytest.approx(0.1, rel=1e-3)


def every_group():
    """Of each of some nodes, the names of the parameters that are not decayed."""
    applied = Trial().apply({})
    found = []
    for node in NODES:
        groups = applied.optimizer(functools.partial(make_optimizer, node)).param_groups
        found.append({name for group in groups for name in group["names"] if not group["weight_decay"]})
    plain = make_optimizer(ADAMW, applied.parameters()).param_groups
    sizes = [{p.dim() for p in group["params"]} for group in plain]
    return found, [(dims, group["weight_decay"]) for dims, group in zip(sizes, plain, strict=True)]


NODES = [
    ADAMW,
    {"_target_": "torch.optim.AdamW", "lr": 0.1},  # torch's own decay
    {
        **ADAMW,
        "groups": {"@vocab.*": {"weight_decay": 0.0}, "norm.weight": {"weight_decay": 0.1}, "@embed": {"lr": 1.0}},
    },
    ALL,
    {**ALL, "groups": {"@embed": {"weight_decay": 0.0}}},
]


def test_norms_are_not_decayed_unless_the_config_says_so(plait_ranks):
    ((found, plain),) = plait_ranks.run(every_group, world=1)
    norms = {name for name, _ in llama3().named_parameters() if "norm" in name}
    ends = {"tok_embeddings.weight", "output.weight"}
    assert found == [norms, norms, norms - {"norm.weight"} | ends, set(), norms]
    assert plain == [({2}, 0.5), ({1}, 0.0)]


@pytest.mark.parametrize(
    ("logical", "vector"),
    [
        (("experts", "ffn"), True),
        (("experts",), True),
        (("experts", "ffn", "embed"), False),
        ((None, "embed"), False),
        ((), True),
    ],
)
def test_experts_are_counted_one_by_one(logical, vector):
    params = [torch.zeros([2] * len(logical))]
    assert is_vector({"params": params, "logical": [logical]}, 0) == vector


def split_over_stages(patterns):
    applied = Trial().apply({"pipeline": {}})
    try:
        applied.optimizer(lambda groups: make_optimizer({**ADAMW, "groups": patterns}, groups))
    except PlaitError as error:
        return str(error)
    return None


def test_a_pattern_may_match_on_another_rank(plait_ranks):
    assert plait_ranks.run(split_over_stages, {"output.weight": {"lr": 1.0}}, world=2) == [None, None]
    for said in plait_ranks.run(split_over_stages, {"head.weight": {"lr": 1.0}}, world=2):
        assert "the pattern 'head.weight' matches no parameter" in said


GROUPS = "optimizer.groups"
BAD = [
    ({"*.wieght": {"lr": 0.1}}, (GROUPS, "*.wieght")),
    ({"@vocb.embed": {"lr": 0.1}}, (GROUPS, "@vocb.embed")),
    ({"@embed.vocab": {"lr": 0.1}}, (GROUPS, "@embed.vocab")),
    ({"norm.weight": {"momentum": 0.1}}, (f"{GROUPS}.norm.weight.momentum",)),
    ({"norm.weight": {"fused": True}}, (f"{GROUPS}.norm.weight.fused",)),
    ({"norm.weight": {"params": []}}, (f"{GROUPS}.norm.weight.params",)),
    ({"norm.weight": {"weight_decay": -1.0}}, (f"{GROUPS}.norm.weight.weight_decay", -1.0)),
    ({"norm.weight": {"eps": "small"}}, (f"{GROUPS}.norm.weight.eps", "small")),
    ({"norm.weight": {"lr": -1.0}}, (f"{GROUPS}.norm.weight.lr", -1.0)),
    ({"norm.weight": {"lr": float("nan")}}, (f"{GROUPS}.norm.weight.lr",)),
    ({"norm.weight": {}}, (f"{GROUPS}.norm.weight", {})),
    ({"norm.weight": 0.1}, (f"{GROUPS}.norm.weight", 0.1)),
    (["norm.weight"], (GROUPS, ["norm.weight"])),
]


@pytest.mark.parametrize(("groups", "about"), BAD)
def test_what_is_wrong_is_named_before_there_are_ranks(groups, about):
    with torch.device("meta"):
        model = llama3()
    given = groups_of([model], model.spec())
    with raises_about(*about):
        check_optimizer({**ADAMW, "groups": groups}, given)
    check_optimizer({**ADAMW, "groups": PATTERNS}, given)


def test_the_nearest_name_is_said():
    with torch.device("meta"):
        model = llama3()
    given = groups_of([model], model.spec())
    for pattern, near in (("@vocb.embed", "@vocab.embed"), ("outptu.weight", "output.weight")):
        with pytest.raises(PlaitError, match=f"did you mean '{near}'"):
            check_optimizer({**ADAMW, "groups": {pattern: {"lr": 0.1}}}, given)
    with raises_about("optimizer.decays", "norms"):
        check_optimizer({**ADAMW, "decays": "norms"}, given)


def test_patterns_need_names():
    with raises_about(GROUPS):
        make_optimizer({**ADAMW, "groups": PATTERNS}, parameters())


def test_an_optimizer_may_act_by_logical_axes(plait_ranks):
    """It is tried on stand-ins of each kind, with what stands beside them."""
    ((kinds, keys),) = plait_ranks.run(by_axes, world=1)
    assert kinds == {("vocab", "embed"): "sign", ("embed",): "sign", ("ffn", "embed"): "mean"}
    assert keys == {"tok_embeddings.weight": set(), "layers.0.feed_forward.w1.weight": {"mean"}}


def by_axes():
    applied = Trial().apply({})
    optimizer = applied.optimizer(lambda groups: make_optimizer(BY_AXES, groups, schedule=Schedule()))
    take_step(applied, optimizer, Trial(), 0)
    axes = {}
    for group in optimizer.param_groups:
        for logical, param in zip(group["logical"], group["params"], strict=True):
            axes[logical] = "mean" if "mean" in optimizer.state[param] else "sign"
    keys = state_keys(BY_AXES, groups_of(applied.parts, applied.spec))
    names = ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight")
    wanted = [("vocab", "embed"), ("embed",), ("ffn", "embed")]
    return {each: axes[each] for each in wanted}, {name: keys[name] for name in names}


def rates(config, folder):
    from plait.records.run_folder import RunFolder
    from plait.train.trainer import Trainer

    trainer = Trainer(config, RunFolder(folder), lambda text: None)
    found = []
    for _ in range(3):
        metrics, _ = trainer.train_step()
        groups = trainer.optimizer.param_groups
        found.append((metrics.row()["lr"], {name: group["lr"] for group in groups for name in group["names"]}))
    return found


def test_each_group_keeps_its_own_rate_times_the_schedules_factor(plait_ranks, tmp_path):
    from plait.host import check, compose

    more = ["schedule.warmup_steps=4", "model.vocab_size=257"]
    config = compose(whole_run.overrides({}, tmp_path, 1, *more))
    config = check(config.with_value("optimizer", {**ADAMW, "groups": PATTERNS}), 1).config
    (tmp_path / "versions.json").write_text("{}")
    (found,) = plait_ranks.run(rates, config, tmp_path, world=1)
    for step, (reported, own) in enumerate(found, 1):
        assert reported == 0.1 * step / 4
        assert own["norm.weight"] == 0.1 * step / 4
        assert own["layers.0.attention_norm.weight"] == 0.2 * step / 4
        assert own["output.weight"] == 0.01 * step / 4
