"""A strategy that undoes what stood in the model before it acted is refused by name. One process."""

import functools
import types
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait import PlaitError, hookimpl, mix_in, transform_param
from plait.testing import Trial
from plait_testing.models import llama3


class Adds:
    def forward(self, x):
        plain: Any = super()
        return plain.forward(x) + 1


def acting(name, how, phase="graph"):
    """A strategy that does `how` to the model."""

    class Acts:
        @hookimpl
        def parallelize(self, model):
            return how(model)

    cls: Any = Acts
    cls.name, cls.phase = name, phase
    return cls()


def refused(plait_ranks, *strategies):
    def on_rank():
        with torch.device("meta"):
            made = llama3(tie_embeddings=True)
        with pytest.raises(PlaitError) as caught:
            plait.apply(made, made.spec(), strategies)
        return str(caught.value)

    (said,) = plait_ranks.run(on_rank, world=1)
    assert said.startswith("strategy 'second' "), said
    assert len(said.splitlines()) == 1
    return said


def mixes(model):
    mix_in(model.norm, Adds)


def transforms(model):
    transform_param(model.norm, "weight", torch.neg)


def wraps(model):
    plain = model.norm.forward
    model.norm.forward = lambda x: plain(x) + 1


def hooks(model):
    model.norm.register_forward_hook(lambda module, args, result: result + 1)


def becomes(forward):
    """Gives the norm this forward, made of the module."""

    def act(model):
        model.norm.forward = forward(model.norm)

    return act


def of_class(cls):
    def act(model):
        model.norm.__class__ = cls(type(model.norm))

    return act


assigns = becomes(lambda norm: lambda x: x)
binds = becomes(lambda norm: types.MethodType(lambda self, x: x, norm))
compiles = becomes(lambda norm: torch.compile(lambda x: x, backend="eager"))
swaps = of_class(lambda cls: type("Swapped", (cls,), {"forward": lambda self, x: x}))
strips = of_class(lambda cls: nn.RMSNorm)


def untied(model):
    model.output.weight = nn.Parameter(model.output.weight.detach())


def replaces(model):
    model.norm = nn.RMSNorm(32)


def deletes(model):
    del model.norm.forward


def note(module, args):
    pass


def twice(model):
    for _ in range(2):
        model.norm.register_forward_pre_hook(note)


def test_ties_stay(plait_ranks):
    said = refused(plait_ranks, acting("second", untied))
    assert "made two parameters of 'tok_embeddings.weight' and 'output.weight', which the model ties" in said


LOSE = (assigns, binds, swaps, strips, compiles)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        *((mixes, after, "does not call the forward that tests.parallel.test_kept.Adds gave it") for after in LOSE),
        (transforms, assigns, "does not call the forward that transform_param('weight') gave it"),
        (transforms, strips, "does not call the forward that transform_param('weight') gave it"),
        (wraps, assigns, "does not call the forward tests.parallel.test_kept.wraps.<locals>.<lambda>"),
        (wraps, deletes, "does not call the forward tests.parallel.test_kept.wraps.<locals>.<lambda>"),
        (mixes, replaces, "replaced the RMSNorm 'norm', and so took from the model the forward that"),
        (transforms, replaces, "took from the model the forward that transform_param('weight') gave it"),
        (hooks, replaces, "took from the model its 1 hook(s)"),
        (None, twice, "registered the hook tests.parallel.test_kept.note twice on 'norm'"),
    ],
)
def test_what_another_gave_stays(plait_ranks, before, after, says):
    first = [acting("first", before, "model")] if before else []
    assert says in refused(plait_ranks, *first, acting("second", after))


chains = becomes(lambda norm: functools.wraps(norm.forward)(lambda x, plain=norm.forward: plain(x)))
partially = becomes(lambda norm: functools.partial(lambda plain, x: plain(x), norm.forward))
compiled = becomes(lambda norm: torch.compile(norm.forward, backend="eager"))


def around(model):
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    model.norm = Around(model.norm)


@pytest.mark.parametrize("before", [mixes, transforms, wraps, hooks])
@pytest.mark.parametrize("after", [chains, partially, compiled, around])
def test_what_calls_what_was_there_is_welcome(plait_ranks, before, after):
    def on_rank():
        made = Trial().build()
        both = [acting("first", before, "model"), acting("second", after, "runtime")]
        return len(plait.apply(made.to_empty(device="cpu"), made.spec(), both).parts)

    assert plait_ranks.run(on_rank, world=1) == [1]
