"""A module has the forwards of all that were mixed in, or the one that would undo another is refused by name."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from plait import PlaitError, mix_in, transform_param


class Adds:
    def forward(self, x):
        plain: Any = super()
        return plain.forward(x) + 1


class Doubles:
    """Calls `super()` in a method of its own."""

    def forward(self, x):
        return 2 * self._plain(x)

    def _plain(self, x):
        plain: Any = super()
        return plain.forward(x)


def passing(method):
    @functools.wraps(method)
    def call(self, *args):
        return method(self, *args)

    return call


class Decorated:
    @passing
    def forward(self, x):
        plain: Any = super()
        return plain.forward(x) - 1


class Replaces:
    def forward(self, x):
        return 10 * x


class Inherits(Replaces):
    pass


class Quantises:
    """Of `super()` it wants something else than the forward."""

    def forward(self, x):
        plain: Any = super()
        assert plain.extra_repr()
        one: Any = self
        return nn.functional.linear(x, 10 * one.weight)


class Guards:
    """Without a forward."""

    def __call__(self, x):
        plain: Any = super()
        return plain.__call__(x) + 100


class Grabs:
    def __call__(self, x):
        return x


def mixed(*mixins):
    module = nn.Linear(2, 2, bias=False)
    nn.init.eye_(module.weight)
    for each in mixins:
        mix_in(module, each)
    return module


ONE = torch.ones(1, 2)


@pytest.mark.parametrize(
    ("mixins", "expected"),
    [
        ((Adds, Doubles), 4.0),
        ((Doubles, Adds), 3.0),
        ((Replaces, Adds, Doubles, Decorated), 21.0),
        ((Adds, Guards), 102.0),
        ((Quantises, Adds), 11.0),
        ((Guards, Replaces), 110.0),
    ],
)
def test_all_act(mixins, expected):
    assert torch.equal(mixed(*mixins)(ONE), torch.full((1, 2), expected))


@pytest.mark.parametrize(
    ("mixins", "method"),
    [
        ((Adds, Replaces), "forward"),
        ((Adds, Inherits), "forward"),
        ((Adds, Quantises), "forward"),
        ((Adds, Guards, Replaces), "forward"),
        ((Decorated, Doubles, Replaces), "forward"),
        ((Guards, Adds, Grabs), "__call__"),
    ],
)
def test_one_that_would_undo_another_is_refused_and_both_are_named(mixins, method):
    first = next(each for each in reversed(mixins[:-1]) if method in vars(each))
    module = mixed(*mixins[:-1])
    before = type(module)
    with pytest.raises(PlaitError) as caught:
        mix_in(module, mixins[-1])
    said = str(caught.value)
    assert f".{mixins[-1].__name__} would replace the {method} that " in said
    assert f".{first.__name__} gave a Linear" in said
    assert type(module) is before


def test_once_is_enough():
    with pytest.raises(PlaitError, match=r"Adds is mixed into a Linear that has it already: mix it in once"):
        mixed(Adds, Doubles, Adds)


def test_a_replaced_forward_would_not_see_transforms():
    module = mixed()
    transform_param(module, "weight", torch.neg)
    with pytest.raises(PlaitError, match=r"Replaces would replace the forward that transform_param\('weight'\) gave"):
        mix_in(module, Replaces)
    mix_in(module, Adds)
    assert torch.equal(module(ONE), torch.zeros(1, 2))


def test_transforms_keep_what_was_mixed_in_after_others():
    module = nn.Linear(2, 2)
    nn.init.eye_(module.weight)
    nn.init.ones_(module.bias)
    transform_param(module, "weight", torch.neg)
    mix_in(module, Doubles)
    transform_param(module, "bias", torch.neg)
    transform_param(module, "weight", torch.neg)
    assert torch.equal(module(ONE), torch.zeros(1, 2))  # 2 * (1 - 1)
    assert module.weight is module._parameters["weight"]
    assert module.bias is module._parameters["bias"]


def test_a_modules_own_forward_would_hide_a_mix_in():
    module = mixed()
    module.forward = torch.compile(module.forward, backend="eager")
    with pytest.raises(PlaitError, match=r"Adds is mixed into a Linear whose own forward is .*Linear\.forward, which"):
        mix_in(module, Adds)


def test_a_product_of_another_dtype_beside_a_part_of_its_weight():
    """As float8 and tensor parallelism have it, in either order: both act, or the second is refused."""
    module = mixed(Quantises)
    transform_param(module, "weight", lambda weight: weight[:1])
    assert torch.equal(module(ONE), torch.full((1, 1), 10.0))
    module = mixed()
    transform_param(module, "weight", lambda weight: weight[:1])
    with pytest.raises(PlaitError, match=r"Quantises would replace the forward that transform_param\('weight'\) gave"):
        mix_in(module, Quantises)
