"""fsdp2 gathers experts as a unit of their own: as often as need be, whatever its options and recomputation."""

import functools
from typing import Any, cast

import attrs
import pytest
from crowd import Crowd, Town
from test_town import same
from torch.distributed.fsdp import FSDPModule, fully_shard

from plait.ops import Normal
from plait_testing.count import Counting
from plait_testing.models import moe
from plait_testing.parity import unequal
from plait_testing.trial import Trial, forward_backward, train

OPTIONS = [{"prefetch": 1}, {"prefetch": 2, "reshard_after_forward": "always"}, {"reshard_after_forward": "never"}]


REMAT = ("none", "full", "selective")


def gathers(options, remat):
    """How often the experts' parameters are gathered in a step, and their gradients reduced."""
    trial = Trial(functools.partial(moe, n_layers=4), remat=remat)  # three layers of experts
    applied = trial.apply({"fsdp2": options, "expert_parallel": {"degree": 2}})
    forward_backward(applied, trial, 0)
    with Counting(applied.mesh) as counting:
        forward_backward(applied, trial, 1)
    found = {(c.op, c.axis): c.count for c in counting.found()}
    return found["all_gather", "experts.dp_shard"], found["reduce_scatter", "experts.dp_shard"]


GATHERED = [(*one, remat) for one in [({}, 5), *zip(OPTIONS, (5, 6, 3), strict=True)] for remat in REMAT]


@pytest.mark.parametrize(
    ("options", "gathered", "remat"),
    [way if i == 4 else pytest.param(*way, marks=pytest.mark.slow) for i, way in enumerate(GATHERED)],
)
def test_as_often_as_need_be(plait_ranks, options, gathered, remat):
    assert plait_ranks.run(gathers, options, remat, world=4) == [(gathered, 3)] * 4


WAYS = [("moe", options, remat) for options in OPTIONS for remat in ("none", "selective")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "remat"),
    [(Town, OPTIONS[2], "selective"), *WAYS],
)
def test_same_training(plait_ranks, model, options, remat):
    trial = Trial(model, dtype="float32", remat=remat)
    experts = {"expert_parallel": {"degree": 2}}
    plain = plait_ranks.run(train, trial, {"fsdp2": {}, **experts}, world=4)
    for rank, result in enumerate(plait_ranks.run(train, trial, {"fsdp2": options, **experts}, world=4)):
        assert result.losses == plain[rank].losses
        assert unequal(result.final, plain[rank].final) is None


def held(model, strategies):
    params: Any = Trial(model).apply(strategies).parts[0].named_parameters()
    return {name: p.to_local().numel() for name, p in params if "people" in name}


@pytest.mark.parametrize("degree", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fewer_experts_than_ranks(plait_ranks, degree):
    few, strategies = functools.partial(Town, experts=2), {"fsdp2": {}, "expert_parallel": {"degree": degree}}
    same(plait_ranks, Trial(few), 4, strategies)
    whole = {name: p.numel() for name, p in Trial(few).build().named_parameters()}
    for found in plait_ranks.run(held, few, strategies, world=4):
        assert found == {name: whole[name] // 4 for name in found}


class Started(Town):
    """A crowd before the first block too."""

    def __init__(self):
        super().__init__()
        self.first = Crowd(4, 24, 16, None)

    def forward(self, tokens, positions=None):
        x_BTD = self.words(tokens)
        x_BTD = x_BTD + self.first(x_BTD)
        for cell in self.cells:
            x_BTD = cell(x_BTD)
        return self.answer(self.norm(x_BTD))

    def spec(self):
        spec = super().spec()
        own = {
            f"first{name.removeprefix('cells.*.crowd')}": value for name, value in spec.axes.items() if "crowd" in name
        }
        names = {"before": ("words", "first"), "after": ("norm", "answer"), "branches": (*spec.branches, "first")}
        return attrs.evolve(spec, axes=spec.axes | own, init={"first.*.*": Normal(0.2), **spec.init}, **names)


def units():
    """FQNs of the modules of each of fsdp2's groups."""
    (model,) = Trial(Started).apply({"fsdp2": {}, "expert_parallel": {"degree": 2}}).parts
    found, shard = {}, cast(Any, fully_shard)
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            found.setdefault(id(shard.state(module)), []).append(name)
    return sorted(found.values())


@pytest.mark.slow
def test_experts_before_the_blocks_keep_to_their_own_ranks(plait_ranks):
    same(plait_ranks, Trial(Started), 4, {"fsdp2": {}, "expert_parallel": {"degree": 2}})
    assert plait_ranks.run(units, world=4)[0] == [
        [""], ["cells.0"], ["cells.0.crowd.people"], ["cells.1"], ["cells.1.crowd.people"], ["first.people"],
        ["norm", "answer"], ["words", "first"],
    ]  # fmt: skip


def ahead(options):
    """What fsdp2 is told to gather ahead of each module: FQN -> FQNs, in forward and in backward."""
    told = {"forward": {}, "backward": {}}
    for way, found in told.items():
        real = getattr(FSDPModule, f"set_modules_to_{way}_prefetch")

        def note(module, modules, found=found, real=real):
            found[module] = list(modules)
            real(module, modules)

        setattr(FSDPModule, f"set_modules_to_{way}_prefetch", note)
        try:
            model = Trial(functools.partial(moe, n_layers=4)).apply({"expert_parallel": {}, "fsdp2": options}).parts[0]
        finally:
            setattr(FSDPModule, f"set_modules_to_{way}_prefetch", real)
        names = {module: name.removeprefix("layers.") for name, module in model.named_modules()}
        told[way] = {names[m]: [names[x] for x in found[m]] for m in found}
    return told


def test_what_is_needed_first_is_gathered_first(plait_ranks):
    (told, *_) = plait_ranks.run(ahead, {"prefetch": 2}, world=4)
    experts = "{}.feed_forward.experts".format
    assert told["forward"] == {
        "tok_embeddings": ["0", "1", experts(1)],
        "0": ["1", experts(1), "2", experts(2)],
        "1": [experts(1), "2", experts(2), "3", experts(3)],
        "2": [experts(2), "3", experts(3), "norm"],  # with the head
        "3": [experts(3), "norm"],
        "norm": [],
    }
    assert told["backward"] == {  # a block's experts come after what stands behind them, and before what leads to them
        "norm": ["3", experts(3), "2", experts(2)],
        "3": [experts(3), "2", experts(2), "1", experts(1)],
        "2": [experts(2), "1", experts(1), "0"],
        "1": [experts(1), "0", "tok_embeddings"],
        "0": ["tok_embeddings"],
        "tok_embeddings": [],
    }
