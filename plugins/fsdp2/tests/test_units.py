"""What stands before and after the blocks is gathered only while it is needed."""

import attrs
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait import ModelSpec
from plait.ops import Normal
from plait.testing import Counting, Trial, assert_same, forward_backward, train, unequal
from plait_testing.models import VOCAB, llama3


def whole_models(**changes):
    """The tiny llama3 without `before` and `after`: all outside blocks is the root's."""
    model = llama3(**changes)
    spec = attrs.evolve(model.spec(), before=(), after=())
    model.spec = lambda: spec
    return model


def tied():
    return llama3(tie_embeddings=True)


def tied_whole_models():
    return whole_models(tie_embeddings=True)


def held(trial, options, micro=1):
    """Bytes of gathered parameters outside blocks that a rank has during the first block's forward and backward."""
    applied = trial.apply({"fsdp2": options})
    (model,) = applied.parts
    outside = [*model.tok_embeddings.parameters(), *model.norm.parameters(), *model.output.parameters()]
    assert all(isinstance(p, DTensor) for p in outside)
    found = {"forward": 0, "backward": 0}

    def look(when):
        memory = {}
        for module in (model.tok_embeddings, model.norm, model.output):
            for param in module.parameters():
                if not isinstance(param, DTensor):
                    storage = param.untyped_storage()
                    memory[storage._cdata] = storage.nbytes()
        found[when] = max(found[when], sum(memory.values()))

    def watch(block, args, result):
        look("forward")
        result.register_hook(lambda grad: look("backward"))

    model.layers["0"].register_forward_hook(watch)
    for step in range(2):
        forward_backward(applied, attrs.evolve(trial, micro=micro), step)
    return found


@pytest.mark.parametrize("micro", [1, 2])
def test_during_blocks_nothing_else_is_held(plait_ranks, micro):
    whole = 4 * (2 * VOCAB * 32 + 32)  # float32: embedding, head, norm
    now, before = (
        plait_ranks.run(held, Trial(model, dtype="float32"), {}, micro, world=2) for model in (llama3, whole_models)
    )
    assert before == [{"forward": whole, "backward": whole}] * 2
    assert now == [{"forward": 0, "backward": 0}] * 2


def test_a_tied_weight_is_held_from_its_first_use_to_its_last(plait_ranks):
    whole = 4 * (VOCAB * 32 + 32)
    assert (
        plait_ranks.run(held, Trial(tied, dtype="float32"), {}, world=2) == [{"forward": whole, "backward": whole}] * 2
    )


def gathers(trial, options):
    """How often ranks gather shards in one step that follows a validation."""
    applied = trial.apply({"fsdp2": options})
    with torch.no_grad():
        applied.parts[0](trial.batch(0)[0])
    forward_backward(applied, trial, 0)
    with Counting(applied.mesh) as counting:
        forward_backward(applied, trial, 1)
    return sum(c.count for c in counting.found() if c.op == "all_gather")


ALWAYS, NEVER = ({"reshard_after_forward": when} for when in ("always", "never"))


@pytest.mark.parametrize(
    ("model", "options", "forward", "backward"),
    [
        (llama3, {}, 4, 1),  # backward: the first of two blocks
        (llama3, ALWAYS, 4, 3),  # both blocks and the head; never the embedding
        (llama3, {"prefetch": 2}, 4, 1),
        (llama3, NEVER, 4, 0),
        (tied, {}, 3, 1),
        (tied, ALWAYS, 3, 3),
        (tied, {"prefetch": 2}, 3, 1),
        (whole_models, {}, 3, 1),
        (whole_models, {"reshard_root": True}, 3, 2),
    ],
)
def test_each_is_gathered_as_often_as_need_be(plait_ranks, model, options, forward, backward):
    assert plait_ranks.run(gathers, Trial(model), options, world=2) == [forward + backward] * 2


class Started(nn.Module):
    """Before the blocks an embedding, positions and what `start` says: nothing, or what backward needs a weight of."""

    def __init__(self, start=""):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, 16), nn.Embedding(64, 16)
        self.first = {"": nn.Identity, "norm": lambda: nn.LayerNorm(16), "matrix": lambda: nn.Linear(16, 16)}[start]()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens, positions=None):
        places = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        x = self.first(self.words(tokens) + self.places(places.expand_as(tokens)))
        x += 1.0  # in place, as some models add positions
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)

    def spec(self):
        names = [name for name, _ in self.named_parameters()]
        axes = {name: (None,) * p.dim() for name, p in self.named_parameters()}
        return ModelSpec(
            axes=axes,
            blocks=("blocks.*",),
            init=dict.fromkeys(names, Normal(0.5)),
            before=("words", "places", "first"),
            after=("head",),
        )


class View(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x)[:]


class Viewed(Started):
    def __init__(self):
        super().__init__()
        self.first = View(16)


class Normed(Started):
    def __init__(self):
        super().__init__("norm")


class Multiplied(Started):
    def __init__(self):
        super().__init__("matrix")


@pytest.mark.parametrize(
    ("model", "again"),
    [(Started, 0), (Viewed, 1), *(pytest.param(x, 1, marks=pytest.mark.slow) for x in (Normed, Multiplied))],
)
def test_what_backward_needs_is_gathered_again(plait_ranks, model, again):
    trial = Trial(model)
    assert plait_ranks.run(gathers, trial, {}, world=2) == [5 + 2 + again] * 2
    (one,) = plait_ranks.run(train, trial, world=1)
    for micro in (1, 2):
        assert_same(plait_ranks.run(train, attrs.evolve(trial, micro=micro), {"fsdp2": {}}, world=2), one)


@pytest.mark.parametrize(
    ("model", "whole"), [pytest.param(llama3, whole_models, marks=pytest.mark.slow), (tied, tied_whole_models)]
)
def test_units_change_no_number(plait_ranks, model, whole):
    """Bitwise what one group of everything outside blocks computes."""
    options = {"fsdp2": {"replicate": 2}}
    found = [plait_ranks.run(train, Trial(each, dtype="float32"), options, world=4) for each in (model, whole)]
    for ours, theirs in zip(*found, strict=True):
        assert ours.losses == theirs.losses
        assert ours.norms == theirs.norms
        assert unequal(ours.final, theirs.final) is None
