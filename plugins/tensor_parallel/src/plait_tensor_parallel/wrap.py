"""What modules are called with and what they return: the stream is exchanged, what does not fit is refused."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from plait import PlaitError


def wrap_forward(
    module: nn.Module,
    where: str,
    before: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Replace x, `module`'s first argument, by `before(x)`, and its (first) result y by `after(y, before(x))`.

    Attention may get one stream as query, key and value: each argument that is x is replaced. Raises PlaitError for
    another that is a stream, or needs a gradient, of which a rank would have a part.
    """
    name = next(iter(inspect.signature(module.forward).parameters))

    def change(module: nn.Module, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs[_first_of(kwargs, name)]
        moved = before(x)  # type: ignore[misc] # registered only if it is there
        for key, other in (*enumerate(args, 1), *kwargs.items()):
            if other is not x:
                for each in other if isinstance(other, tuple | list) else (other,):
                    _refuse_second(key, each, x, where)
        return (
            tuple(moved if each is x else each for each in args),
            {key: moved if each is x else each for key, each in kwargs.items()},
        )

    def found(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        x = args[0] if args else kwargs[_first_of(kwargs, name)]
        if isinstance(result, tuple):
            return (after(result[0], x), *result[1:])  # type: ignore[misc] # registered only if it is there
        return after(result, x)  # type: ignore[misc] # registered only if it is there

    if before is not None:
        module.register_forward_pre_hook(change, with_kwargs=True)
    if after is not None:
        module.register_forward_hook(found, with_kwargs=True)


def _first_of(kwargs: Any, name: str) -> str:
    """`name`, or the first keyword if a forward that was mixed in takes any."""
    return name if name in kwargs else next(iter(kwargs))


def _refuse_second(key: int | str, other: Any, x: Tensor, where: str) -> None:
    floats = isinstance(other, Tensor) and other.is_floating_point() and x.is_floating_point()
    if floats and (other.requires_grad or other.shape == x.shape):
        raise PlaitError(
            f"{where!r} gets the stream, {tuple(x.shape)}, and another tensor that changes with training or has "
            f"its shape, argument {key} of {tuple(other.shape)}: a rank would have only a part of it, or of its "
            "gradient; pass one stream, in as many arguments as you like, beside constants such as masks, and "
            "compute all else inside"
        )


def writable(x: Tensor) -> Tensor:
    """`x`, not copied, as a tensor that a model may write to: autograd forbids that for what a DTensor returns, which
    nobody else reads here."""
    return torch.ops.aten._unsafe_view(x, x.shape)  # backward it copies nothing, where `unsafe_chunk` does


def wide(x: Tensor, width: int, where: str) -> Tensor:
    """`x`, with which a matrix with rows of `width` elements is called."""
    if x.shape[-1] != width:
        raise PlaitError(
            f"{where!r} is a divided matrix outside branches with rows of {width} elements, but its input has "
            f"{x.shape[-1]}: its output is along its columns; store it as nn.Linear does, or name its feed-forward as "
            "a branch"
        )
    return x


def summand(y: Tensor, x: Tensor, where: str, of_stream: bool) -> Tensor:
    """`y`, which the branch `where` returns for `x`: the stream, or what another branch made of it."""
    if y.shape[:-1] != x.shape[:-1] or (of_stream and y.shape != x.shape):
        raise PlaitError(
            f"the branch {where!r} returns {tuple(y.shape)} for a stream of {tuple(x.shape)}: what it returns is added "
            "to the stream, so it must have the same batch, tokens and width; name what adds it in the spec's `writers`"
        )
    return y


def check_heads(inner: nn.Module, where: str, heads: int) -> None:
    """Have the attention `inner`, of which this rank has `heads` query heads, raise PlaitError if it gets others."""
    names = list(inspect.signature(inner.forward).parameters)

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        q = args[0] if args else kwargs[names[0]]
        if q.dim() != 4 or q.shape[1] != heads:
            raise PlaitError(
                f"the attention {where!r} got queries of {tuple(q.shape)}, but this rank has {heads} of the heads, so "
                f"(batch, {heads}, tokens, width) must come: in views, write -1 instead of the number of heads"
            )

    inner.register_forward_pre_hook(check, with_kwargs=True)
