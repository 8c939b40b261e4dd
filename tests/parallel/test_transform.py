"""A transform changes what a module sees of a parameter inside its forward, and nothing else."""

import copy

import pytest
import torch
from torch import nn

from plait.parallel.transform import transform_param


def compiled_once(modules, x):
    """Each computes what it computes by itself, and one graph serves all."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for module in modules:
        eager = module(x)
        module.compile(backend=count, fullgraph=True)
        assert torch.equal(module(x), eager)
    assert len(graphs) == 1


def linear(out=3, into=3):
    torch.manual_seed(0)
    return nn.Linear(into, out)


def test_inside_forward_and_only_there():
    module, x = linear(), torch.randn(2, 3)
    plain = module(x)
    transform_param(module, "weight", lambda p: 2 * p)
    torch.testing.assert_close(module(x) - module.bias, 2 * (plain - module.bias))
    assert module.weight is module._parameters["weight"]
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    assert isinstance(module, nn.Linear)


def test_later_views_sit_nearer_the_storage():
    module, seen = linear(), []
    transform_param(module, "weight", lambda p: seen.append("first") or p)
    transform_param(module, "weight", lambda p: seen.append("second") or p)
    module(torch.zeros(1, 3))
    assert seen == ["second", "first"]


def test_gradients_flow_through_it():
    module, x = linear(), torch.ones(1, 3)
    transform_param(module, "weight", lambda p: 3 * p)
    module(x).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((3, 3), 3.0))


def test_it_is_off_again_after_an_error():
    module = linear()
    transform_param(module, "weight", lambda p: 2 * p)
    with pytest.raises(RuntimeError):
        module(torch.zeros(1, 7))
    assert module.weight is module._parameters["weight"]


def test_two_modules_of_one_class_do_not_mix():
    one, two, x = linear(), linear(), torch.randn(2, 3)
    transform_param(one, "weight", lambda p: 0 * p)
    transform_param(two, "bias", lambda p: 0 * p)
    assert torch.equal(one(x), one.bias.expand(2, 3))
    assert torch.equal(two(x), x @ two.weight.T)
    assert type(linear()) is nn.Linear


def test_a_copy_keeps_its_views():
    module, x = linear(), torch.randn(2, 3)
    transform_param(module, "weight", lambda p: 2 * p)
    assert torch.equal(copy.deepcopy(module)(x), module(x))


def test_unknown_parameters_are_refused():
    with pytest.raises(AttributeError, match="Linear has no parameter 'wieght'"):
        transform_param(linear(), "wieght", lambda p: p)


def test_a_forward_that_would_not_see_it_is_refused():
    module = linear()
    module.forward = torch.compile(module.forward, backend="eager")
    with pytest.raises(
        RuntimeError, match=r"Linear.forward was compiled or wrapped before transform_param\('weight'\)"
    ):
        transform_param(module, "weight", lambda p: p)


def test_one_graph_serves_all_blocks():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = linear(5, 3), linear(3, 5)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    blocks = [Block() for _ in range(3)]
    for block in blocks:
        for module in (block.up, block.down):
            transform_param(module, "weight", double)
    compiled_once(blocks, torch.randn(2, 3))


class Pair(nn.Module):
    """As transformers' mixtures of attention: others call its methods, never the module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))

    def map(self, x):
        return x @ self.weight

    def reduce(self, x, fails=False):
        y = self.map(x)
        if fails:
            raise ValueError
        return y + self.bias

    @torch.no_grad()
    def scale(self, by):
        self.weight.mul_(by)

    @torch.no_grad()
    def reset_to(self, x):
        self.weight.copy_(x)

    def _own(self, x):
        return self.weight

    @staticmethod
    def plain(x):
        return x


class Caller(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = Pair()

    def forward(self, x):
        return self.pair.reduce(self.pair.map(x))


def double(p):
    return 2 * p


def both(module):
    for name in ("weight", "bias"):
        transform_param(module, name, double)
    return module


def test_inside_methods_that_are_called_with_a_tensor():
    plain, pair, x = Pair(), both(Pair()), torch.randn(2, 3)
    assert torch.equal(pair.map(x=x), x @ (2 * plain.weight))
    assert torch.equal(pair.reduce(x), x @ (2 * plain.weight) + 2 * plain.bias)  # one method calls the other
    assert pair.weight is pair._parameters["weight"]
    with pytest.raises(ValueError):
        pair.reduce(x, fails=True)
    assert pair.weight is pair._parameters["weight"]
    assert pair._own(x) is pair.weight
    assert pair.plain(x) is x
    assert torch.equal(copy.deepcopy(pair).map(x), pair.map(x))
    assert type(both(Pair())) is type(pair)


def test_what_writes_to_a_parameter_writes_to_what_is_stored():
    pair, x = both(Pair()), torch.randn(3, 3)
    before = pair.weight.clone()
    pair.scale(3)
    assert torch.equal(pair.weight, 3 * before)
    pair.reset_to(x)
    assert torch.equal(pair.weight, x)


def test_one_graph_has_the_methods_of_all_blocks():
    callers = [Caller() for _ in range(3)]
    for caller in callers:
        both(caller.pair)
    compiled_once(callers, torch.randn(2, 3))


def test_a_compiled_forward_checks_few_things_for_a_transform():
    """Every step checks them again for each block: twice as many were 3% of the host's time of a step on a GPU."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    def checks(module):
        torch._dynamo.reset()

        def plain(x):
            return module(x)

        torch.compile(plain, backend="eager")(torch.randn(2, 3))
        [entry] = _debug_get_cache_entry_list(plain.__code__)
        return str(entry.guard_manager).count("+-")

    transformed = linear()
    transform_param(transformed, "weight", torch.Tensor.float)
    transform_param(transformed, "bias", torch.Tensor.float)
    assert 0 < checks(transformed) - checks(linear()) <= 50
