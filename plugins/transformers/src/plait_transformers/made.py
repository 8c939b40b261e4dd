"""Values that a family's `_init_weights` makes from random numbers, such as the logarithm of a uniform draw.

What it calls is kept as an expression, and computed again with a generator of Plait's.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Generator, Tensor

# Functions that make a tensor of no other's values, and those that draw; methods in place end with `_`.
MAKERS = {"empty", "empty_like", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "arange", "tensor"}
DRAWS = {"rand", "rand_like", "randn", "randn_like", "uniform_", "normal_", "exponential_"}
# Whose result for a row of a tensor is that row of the result.
ELEMENTWISE = {"add", "sub", "rsub", "mul", "div", "truediv", "neg", "exp", "log", "expm1", "log1p", "sqrt", "clamp"}
ELEMENTWISE |= {"clamp_min", "clamp_max", "abs", "pow", "float", "to", "rsqrt", "reciprocal", "erfinv"}


@attrs.frozen
class Drawn:
    """An expression: the function `name` of torch, called with arguments of which some are expressions.

    fill: instead, what was filled into the tensor before, by a function as in a spec's `init`.
    """

    name: str = ""
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    fill: Any = None

    def parts(self) -> Iterator["Drawn"]:
        """This expression, and those inside."""
        yield self
        for value in (*self.args, *(each for _, each in self.kwargs)):
            if isinstance(value, Drawn):
                yield from value.parts()

    def is_random(self) -> bool:
        return any(part.name in DRAWS or part.fill is not None for part in self.parts())

    def by_rows(self) -> bool:
        """Whether a row of the result takes no more than that row of what was filled before."""
        plain = all(isinstance(a, int | float | torch.dtype) for part in self.parts() for a in part.args[1:])
        return plain and all(part.fill is not None or _bare(part.name) in ELEMENTWISE for part in self.parts())

    def value(self, like: Tensor, generator: Generator | None) -> Tensor:
        """The values, if `like` is what they are for: a whole tensor, or a row if it is `by_rows`."""
        if self.fill is not None:
            result: Tensor = self.fill(torch.empty_like(like), generator)
            return result
        done = [a.value(like, generator) if isinstance(a, Drawn) else a for a in self.args]
        named = {n: a.value(like, generator) if isinstance(a, Drawn) else a for n, a in self.kwargs}
        named |= {"generator": generator} if self.name in DRAWS and not self.name.endswith("_like") else {}
        if self.name.endswith("_like") and self.name in DRAWS:  # these take no generator in every torch
            shape = done[0].shape
            return getattr(torch, self.name.removesuffix("_like"))(shape, generator=generator)
        if hasattr(Tensor, self.name) and done and isinstance(done[0], Tensor):
            return getattr(done[0], self.name)(*done[1:], **named)
        return getattr(torch, self.name)(*done, **named)


@attrs.frozen
class Made:
    """Fills a tensor with the values of an expression."""

    of: Drawn

    def __call__(self, tensor: Tensor, generator: Generator | None = None) -> Tensor:
        return tensor.copy_(self.of.value(tensor, generator))


class Drawing:
    """The expressions of tensors that exist; it keeps these alive, so that no other gets their ids."""

    def __init__(self) -> None:
        self._of: dict[int, Drawn] = {}
        self._alive: list[Tensor] = []

    def of(self, tensor: Any) -> Drawn | None:
        return self._of.get(id(tensor))

    def put(self, tensor: Tensor, drawn: Drawn) -> None:
        self._of[id(tensor)] = drawn
        self._alive.append(tensor)

    def forget(self, tensor: Tensor) -> None:
        self._of.pop(id(tensor), None)

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Keep the expression of `result`, if it is made by a function that makes tensors, or of an expression."""
        name = getattr(func, "__name__", "")
        if not isinstance(result, Tensor):
            return
        if _bare(name) in MAKERS | DRAWS or any(id(a) in self._of for a in (*args, *kwargs.values())):
            kept = {n: a for n, a in kwargs.items() if n not in ("device", "generator", "requires_grad", "out")}
            with contextlib.suppress(TypeError):  # what cannot be kept
                self.put(
                    result,
                    Drawn(
                        name,
                        tuple(map(self._kept, args)),
                        tuple(zip(kept, map(self._kept, kept.values()), strict=True)),
                    ),
                )

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if (drawn := self._of.get(id(value))) is not None:
            return drawn
        if value.is_meta:  # only its shape is known
            return Drawn("empty", (tuple(value.shape),), (("dtype", value.dtype),))
        return Drawn("tensor", (value.tolist(),), (("dtype", value.dtype),))


def _bare(name: str) -> str:
    name = name.strip("_")
    return name[1:] if name in ("itruediv", "imul", "iadd", "isub") else name
