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
from plait.testing.models import llama3


class Adds:
    def forward(self, x):
        plain: Any = super()
        return plain.forward(x) + 1


def first(how):
    class First:
        name = "first"
        phase = "model"

        @hookimpl
        def parallelize(self, model):
            return how(model)

    return First()


def second(how, when="graph"):
    class Second:
        name = "second"
        phase = when

        @hookimpl
        def parallelize(self, model):
            return how(model)

    return Second()


def refused(plait_ranks, before, after, when="graph", model=None, **told):
    def on_rank():
        with torch.device("meta"):
            made = model() if model else llama3(tie_embeddings=True)
        with pytest.raises(PlaitError) as caught:
            plait.apply(made, made.spec(), [*([first(before)] if before else []), second(after, when)])
        return str(caught.value)

    (said,) = plait_ranks.run(on_rank, world=1)
    assert said.startswith("strategy 'second' "), said
    assert len(said.splitlines()) == 1
    return said


def untied(model):
    model.output.weight = nn.Parameter(model.output.weight.detach())


def mixes(model):
    mix_in(model.norm, Adds)


def transforms(model):
    transform_param(model.norm, "weight", torch.neg)


def wraps(model):
    plain = model.norm.forward
    model.norm.forward = lambda x: plain(x) + 1


def hooks(model):
    model.norm.register_forward_hook(lambda module, args, result: result + 1)


def assigns(model):
    model.norm.forward = lambda x: x


def binds(model):
    model.norm.forward = types.MethodType(lambda self, x: x, model.norm)


def swaps(model):
    cls = type(model.norm)
    model.norm.__class__ = type("Swapped", (cls,), {"forward": lambda self, x: x})


def strips(model):
    model.norm.__class__ = nn.RMSNorm


def replaces(model):
    model.norm = nn.RMSNorm(32)


def deletes(model):
    del model.norm.forward


def compiles(model):
    def same(x):
        return x

    model.norm.forward = torch.compile(same, backend="eager")


def note(module, args):
    pass


def twice(model):
    model.norm.register_forward_pre_hook(note)
    model.norm.register_forward_pre_hook(note)


def test_ties_stay(plait_ranks):
    said = refused(plait_ranks, None, untied)
    assert "made two parameters of 'tok_embeddings.weight' and 'output.weight', which the model ties" in said


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (mixes, assigns, "does not call the forward that tests.parallel.test_kept.Adds gave it"),
        (mixes, binds, "does not call the forward that tests.parallel.test_kept.Adds gave it"),
        (mixes, swaps, "does not call the forward that tests.parallel.test_kept.Adds gave it"),
        (mixes, strips, "does not call the forward that tests.parallel.test_kept.Adds gave it"),
        (mixes, compiles, "does not call the forward that tests.parallel.test_kept.Adds gave it"),
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
    assert says in refused(plait_ranks, before, after)


def chains(model):
    plain = model.norm.forward

    @functools.wraps(plain)
    def forward(x):
        return plain(x)

    model.norm.forward = forward


def partially(model):
    model.norm.forward = functools.partial(lambda plain, x: plain(x), model.norm.forward)


def compiled(model):
    model.norm.forward = torch.compile(model.norm.forward, backend="eager")


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
        applied = plait.apply(made.to_empty(device="cpu"), made.spec(), [first(before), second(after, "runtime")])
        return len(applied.parts)

    assert plait_ranks.run(on_rank, world=1) == [1]
