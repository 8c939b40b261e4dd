"""What does not survive allocation is said before a step reads it."""

import pytest
import torch
from torch import nn

import plait
from plait import PlaitError
from plait.ops import Normal

pytestmark = pytest.mark.usefixtures("own_group")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        self.register_buffer("table", torch.zeros(4))

    def forward(self, x):
        return self.inner(x)


class Keeps:
    """A strategy that gives the module `inner` what `made` makes of it."""

    name, phase = "keeps", "model"

    def __init__(self, made):
        self.made = made

    @plait.hookimpl
    def parallelize(self, model):
        self.made(model, model.inner)


MADE = {
    "a tensor": lambda model, inner: setattr(inner, "kept", torch.ones(2, device="meta")),
    "a view of a parameter": lambda model, inner: setattr(inner, "kept", inner.weight.t()),
    "a buffer": lambda model, inner: setattr(inner, "kept", [model.table]),
    "a parameter that was replaced": lambda model, inner: (
        setattr(inner, "kept", {"weight": inner.weight}),
        setattr(inner, "weight", nn.Parameter(torch.empty(4, 4, device="meta"))),
    ),
}


def applied(made):
    with torch.device("meta"):
        model = Model()
    init = {"inner.weight": Normal(0.1), "table": Normal(0.1)}
    spec = plait.ModelSpec(axes={"inner.weight": (None, None)}, init=init, blocks=["inner"])
    return plait.apply(model, spec, [Keeps(made)])


@pytest.mark.parametrize("what", MADE)
def test_a_tensor_without_values_is_named(what):
    with pytest.raises(PlaitError, match=r"^'inner' keeps a tensor in its attribute 'kept' that gets no values when"):
        applied(MADE[what])


def test_what_is_set_on_a_parameter_survives():
    weight = applied(lambda model, inner: setattr(inner.weight, "scale", 3.0)).parts[0].inner.weight
    assert (weight.scale, weight.is_meta) == (3.0, False)
    with pytest.raises(PlaitError, match=r"^'inner\.weight' keeps a tensor in its attribute 'scale' that gets no"):
        applied(lambda model, inner: setattr(inner.weight, "scale", torch.ones(2, device="meta")))


def test_a_parameter_itself_survives():
    model = applied(lambda model, inner: setattr(inner, "kept", [inner.weight])).parts[0]
    assert model.inner.kept[0] is model.inner.weight
    assert not model.inner.weight.is_meta
