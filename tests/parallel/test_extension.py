"""Strategies that add parameters to a model."""

import attrs
import pytest
import torch
from torch import nn

from plait import Config, PlaitError, hookimpl
from plait.ops import ones
from plait.parallel.assembly import assemble_model
from plait.strategies.blame import WrongAnswer
from plait.testing import Trial


class Adds:
    """Adds `extra` to the model. said: how it changes the spec."""

    def __init__(self, said):
        self.said = said

    @hookimpl
    def extend(self, model, spec):
        model.extra = nn.Parameter(torch.empty(2, 3, device="meta"))
        return self.said(spec)


def assembled(*strategies, model=None):
    model = model or Trial().build()
    named = {f"adds{i}": strategy for i, strategy in enumerate(strategies)}
    made = assemble_model(model, model.spec(), named, Config(), 1, "cpu")
    return made.extend().run, made.hooks


def described(spec, axes=("embed", None)):
    return attrs.evolve(spec, axes={"extra": axes} | dict(spec.axes), init={"extra": ones} | dict(spec.init))


def test_the_model_is_as_it_was_until_it_is_extended():
    model = Trial().build()
    made = assemble_model(model, model.spec(), {"adds": Adds(described)}, Config(), 1, "cpu")
    assert made.hooks.implemented("extend")
    assert made.layout.world_size == 1
    assert not made.run.added
    assert not hasattr(model, "extra")
    assert made.extend().extend().run.added == {"extra"}


def test_all_see_what_one_added():
    seen = []

    class Sees:
        @hookimpl
        def extend(self, model, spec, run):
            seen.append((spec.axes_of("extra"), "extra" in dict(model.named_parameters())))

    run, _ = assembled(Adds(described), Sees())
    assert seen == [(("embed", None), True)]
    assert run.added == {"extra"}
    assert run.shapes["extra"] == (2, 3)
    assert run.spec.init_of("extra") is ones


def test_a_model_with_values_gets_some():
    model = Trial().build().to_empty(device="cpu")
    assembled(Adds(described), model=model)
    assert torch.equal(model.extra, torch.ones(2, 3))


def test_a_tied_parameter_that_was_added_stays_one():
    class Ties(Adds):
        @hookimpl
        def extend(self, model, spec):
            model.extra = nn.Parameter(torch.empty(2, 3, device="meta"))
            model.documents.extra = model.rope.extra = model.extra
            return self.said(spec)

    model = Trial().build().to_empty(device="cpu")
    assembled(Ties(described), model=model)
    assert model.documents.extra is model.rope.extra is model.extra
    assert torch.equal(model.extra, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("said", "sentence"),
    [(lambda spec: None, "says nothing about 'extra'"), (lambda spec: described(spec, ("embed",)), "it has 2 dims")],
)
def test_what_was_added_must_be_described(said, sentence):
    with pytest.raises(PlaitError, match=sentence):
        assembled(Adds(said))


def test_an_answer_is_a_spec():
    with pytest.raises(WrongAnswer, match="'extend', which must return a ModelSpec"):
        assembled(Adds(lambda spec: spec.axes))
