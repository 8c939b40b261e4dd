"""One name of a tied parameter says everything about it, under every strategy."""

import attrs
import pytest
import torch

from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.parallel.assembly import assemble_model
from plait.testing import assert_same
from plait_testing.models import MODELS
from plait_testing.trial import Trial, train

NAMES = ("words.weight", "readout.weight")


def said(model, **kept):
    """The spec of `model`, which names only `kept` of the tied parameter's names, each with these axes."""
    spec = model.spec()
    axes = {fqn: its for fqn, its in spec.axes.items() if fqn not in NAMES}
    init = {fqn: fill for fqn, fill in spec.init.items() if fqn not in NAMES}
    kept = {f"{name}.weight": its for name, its in kept.items()}
    fill = next(fill for fqn, fill in spec.init.items() if fqn in NAMES)
    return attrs.evolve(spec, axes={**axes, **kept}, init={**init, **dict.fromkeys(kept, fill)})


def odd(name):
    model = MODELS["odd"]()
    spec = said(model, **{name: ("vocab", "embed")})
    model.spec = lambda: spec
    return model


def assembled(spec, model):
    return assemble_model(model, spec, {}, Config(), 1, "cpu")


@pytest.mark.parametrize("name", ["words", pytest.param("readout", marks=pytest.mark.slow)])
def test_one_name_is_enough(plait_ranks, name):
    (one,) = plait_ranks.once(train, Trial("odd"), world=1)
    with torch.device("meta"):
        run = assembled(odd(name).spec(), odd(name)).run
    assert {fqn: run.spec.axes_of(fqn) for fqn in NAMES} == dict.fromkeys(NAMES, ("vocab", "embed"))
    trial = Trial(lambda: odd(name))
    assert_same(plait_ranks.run(train, trial, {"tensor_parallel": {}}, world=2), one)


def test_two_names_that_disagree():
    with torch.device("meta"):
        model = MODELS["odd"]()
    spec = said(model, words=("vocab", "embed"), readout=(None, "embed"))
    with pytest.raises(PlaitError) as caught:
        assembled(spec, model)
    assert str(caught.value) == (
        "the model's spec gives 'words.weight' the axes ('vocab', 'embed') and 'readout.weight' the axes (None, "
        "'embed'), but they are one parameter; give both the same, or name only one"
    )


def test_a_tied_parameter_that_nothing_names():
    with torch.device("meta"):
        model = MODELS["odd"]()
    with pytest.raises(PlaitError, match=r"says nothing about 'words\.weight'"):
        assembled(said(model), model)


def test_one_name_is_enough_where_the_model_has_its_values():
    """Then its spec need not say how to fill it."""
    model = MODELS["odd"]()
    spec = attrs.evolve(said(model, words=("vocab", "embed")), init={})
    run = assembled(spec, model).run
    assert {fqn: run.spec.axes_of(fqn) for fqn in NAMES} == dict.fromkeys(NAMES, ("vocab", "embed"))
