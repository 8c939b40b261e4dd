"""What a strategy may do inside of a compiled block, and what is refused there: each row of docs/hooks.md is tried."""

import logging
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import plait
from plait import Compile, ModelSpec, Precision, Remat
from plait_testing.pool import RankError

WIDTH = 4
F64 = Precision("float64", "float64", "float64")


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        return x @ self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return x + self.inner(x.tanh()).sin()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


SPEC = ModelSpec(axes={"blocks.*.inner.weight": (None, None)}, blocks=["blocks.*"])


@attrs.define
class Acts:
    """A strategy that does something to each block."""

    act: Callable[[nn.Module], Any]
    phase: str = "model"
    name = "acts"

    @plait.hookimpl
    def parallelize(self, model):
        for block in model.blocks:
            self.act(block)


def trained(act, compile=None, later=lambda block: None):
    """(results and gradients of two calls, what the buffer counted, graphs). later: what is done between them."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = Model()
    with torch.no_grad():
        for block in model.blocks:
            block.inner.weight.copy_(torch.arange(WIDTH**2).view(WIDTH, WIDTH) / 8 - 1)
    options, remat = compile or (Compile(), Remat())
    applied = plait.apply(model, SPEC, [Acts(act)], precision=F64, compile=options, remat=remat)
    (part,), found = applied.parts, []
    for _ in range(2):
        torch.manual_seed(0)
        x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
        y = part(x)
        y.sum().backward()
        found += [y.detach(), x.grad, part.blocks[0].inner.weight.grad.clone()]
        for block in part.blocks:
            later(block)
    return found, float(part.blocks[0].inner.count), counters["stats"]["unique_graphs"]


def compared(act, compile, later=lambda block: None):
    """(how far a compiled block is from a plain one, what each counted, graphs)."""
    plain, count, _ = trained(act, later=later)
    found, counted, graphs = trained(act, compile, later)
    return max(float((a - b).abs().max()) for a, b in zip(found, plain, strict=True)), (count, counted), graphs


def sees(fn):
    """The block's parameter through `fn`."""
    return lambda block: plait.transform_param(block.inner, "weight", fn)


def mixes(inner, outer=None):
    """These forwards before those of the block's inner module and of the block."""

    def act(block):
        plait.mix_in(block.inner, inner)
        if outer is not None:
            plait.mix_in(block, outer)

    return act


Mixin: Any = object  # its `super()` is a module, once it is mixed in


class Pair(Mixin):
    def forward(self, x):
        return super().forward(x), 1


class TakesPair(Mixin):
    def forward(self, x):
        return x + self.inner(x)[0]


@attrs.define
class Result:
    y: Any


@attrs.frozen
class Frozen:
    y: Any


class Object(Mixin):
    made: Any = Result

    def forward(self, x):
        return self.made(super().forward(x))


class FrozenObject(Object):
    made = Frozen


class TakesObject(Mixin):
    def forward(self, x):
        return x + self.inner(x).y


class Counts(Mixin):
    def forward(self, x):
        self.count.add_(1)
        return super().forward(x)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p):
        return p.view_as(p)

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


class Wrapped(torch.Tensor):
    """A tensor that holds another one, as quantised ones do."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        args, kwargs = pytree.tree_map_only(Wrapped, lambda wrapped: wrapped.held, (args, kwargs or {}))
        return func(*args, **kwargs)


class Told(Wrapped):
    """The same, and tells a compiler what it holds."""

    def __tensor_flatten__(self):
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Told(inner["held"])


class Wraps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, cls):
        return cls(2 * p)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


def without_grad(p):
    with torch.no_grad():
        p.mul_(0.5)
    return p


def branch(p):
    return p if p.sum() > 0 else 2 * p


def hooked(register, hook, where="inner"):
    """hook: registered on the block's inner module, or on the block itself."""
    return lambda block: getattr(block.inner if where == "inner" else block, register)(hook)


@attrs.define
class Calls:
    """Counts its calls in Python."""

    count: int = 0

    def __call__(self, p):
        self.count += 1
        return 1 * p


@attrs.define
class Scaled:
    """The parameter times the block's number, 1 or 2."""

    number: int = 2

    def __call__(self, p):
        return self.number * p

    def numbered(self, block):
        self.number = 3 - self.number
        plait.transform_param(block.inner, "weight", Scaled(self.number))


ALLOWED = {
    "another shape": sees(lambda p: p[:, 1:].sum(1, keepdim=True)),
    "another dtype": sees(lambda p: p.float().double()),
    "a function of its own": sees(lambda p: Tripled.apply(p)),
    "in place on a new tensor": sees(lambda p: (1 * p).mul_(2)),
    "a choice without the host": sees(lambda p: torch.where(p > 0, p, 2 * p)),
    "a tensor that tells what it holds": sees(lambda p: Wraps.apply(p, Told)),
    "a tuple": mixes(Pair, TakesPair),
    "an object": mixes(Object, TakesObject),
    "a count in a buffer": mixes(Counts),
    "a hook inside": hooked("register_forward_hook", lambda m, args, y: 2 * y),
    "a hook before it": hooked("register_forward_pre_hook", lambda m, args: (2 * args[0],)),
    "a hook on the block": hooked("register_forward_hook", lambda m, args, y: y if y.sum() > 0 else 2 * y, "block"),
    "a backward hook on the block": hooked("register_full_backward_hook", lambda m, x, y: (2 * x[0],), "block"),
    "a hook on the parameter": lambda block: block.inner.weight.register_hook(lambda grad: 2 * grad),
}  # fmt: skip
OF_A_BACKEND = ("a function of its own", "a tensor that tells what it holds", "a count in a buffer", "another dtype")
REFUSED = {
    "a choice by value": sees(branch),
    "values on the host": sees(lambda p: p * p[0].tolist()[0]),
    "output": sees(lambda p: print(end="") or p),
    "what no compiler may see": sees(torch.compiler.disable(lambda p: 2 * p)),
    "a tensor that does not tell": sees(lambda p: Wraps.apply(p, Wrapped)),
    "a frozen object": mixes(FrozenObject, TakesObject),
    "a log": sees(lambda p: logging.getLogger("plait").info("") or p),
    "a backward hook inside": hooked("register_full_backward_hook", lambda *a: None),
}
BREAKS = ("a choice by value", "output", "what no compiler may see")
OFTEN = ("a function of its own", "a hook on the block", "a choice by value", "a write to the parameter")


def cases(table):
    """Most of them say what torch does, which changes with torch alone."""
    return [pytest.param(row, marks=[] if row in OFTEN else pytest.mark.slow) for row in table]


@pytest.mark.parametrize("what", cases(ALLOWED))
def test_what_a_compiled_block_may_do(plait_ranks, what):
    backend = "aot_eager" if what in OF_A_BACKEND else "eager"
    ((error, (plain, compiled), graphs),) = plait_ranks.run(
        compared, ALLOWED[what], (Compile(True, backend), Remat()), world=1
    )
    assert (error < 1e-12, graphs) == (True, 1)
    assert plain == compiled == (2 if "count" in what else 0)


@pytest.mark.parametrize("what", cases(REFUSED))
def test_what_breaks_the_graph_is_refused(plait_ranks, what):
    with pytest.raises(RankError, match=r"_dynamo\.exc\.Unsupported"):
        plait_ranks.run(trained, REFUSED[what], (Compile(True, "aot_eager"), Remat()), world=1)


@pytest.mark.slow
@pytest.mark.parametrize("what", BREAKS)
def test_it_runs_between_graphs_where_the_user_allows_it(plait_ranks, what):
    options = Compile(True, "eager", fullgraph=False)
    ((error, _, graphs),) = plait_ranks.run(compared, REFUSED[what], (options, Remat()), world=1)
    assert error < 1e-12
    assert graphs > 1


def late(block):
    block.inner.register_forward_hook(lambda module, args, y: 2 * y)


EAGER = (Compile(True, "eager"), Remat())
AGAIN = (Compile(), Remat("full"))
SILENT = {  # what is done, how, what is done between two calls; whether results are wrong, graphs, what buffers count
    "a count in Python": (sees(Calls()), EAGER, None, False, 4, (0, 0)),  # compiled again in every call
    "a number of each block": (Scaled().numbered, EAGER, None, False, 2, (0, 0)),
    "a hook that comes late": (lambda block: None, EAGER, late, True, 1, (0, 0)),  # not seen
    "a write to the parameter": (sees(without_grad), AGAIN, None, True, 0, (0, 0)),
    "a random number of torch": (sees(lambda p: p * torch.rand_like(p)), AGAIN, None, True, 0, (0, 0)),
    "a count in a buffer": (mixes(Counts), AGAIN, None, False, 0, (2, 4)),
}


@pytest.mark.parametrize("what", cases(SILENT))
def test_what_nothing_refuses(plait_ranks, what):
    act, how, later, wrong, graphs, counts = SILENT[what]
    ((error, counted, compiled),) = plait_ranks.run(compared, act, how, later or (lambda block: None), world=1)
    assert (error > 1e-3, compiled, counted) == (wrong, graphs, counts)
