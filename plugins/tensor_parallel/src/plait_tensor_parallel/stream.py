"""Moves the residual stream into and out of sharded modules: torch's redistribution of DTensors, both directions.

Between these functions tensors are plain: a rank's own heads, its own part of a feed-forward. So no DTensor passes
through a model's code, and everything that crosses ranks is here.
"""

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plait import PlaitError

WHOLE, SUMMAND = Replicate(), Partial()


@attrs.define(eq=False)
class ResidualStream:
    """The layout of the residual stream on the ranks of `axis`: sharded along the sequence, or the same on all.

    axis: 1-D DeviceMesh. sequence: whether a rank holds only its share of the sequence.
    ended: whether all ranks already have the logits in the current forward: what follows is the same on all.
    looked_up: the shapes of all token ids that were looked up in the current forward.

    `where` is the module that reads or writes the stream, for errors.
    """

    axis: Any
    sequence: bool
    ended: bool = False
    looked_up: tuple[torch.Size, ...] = ()

    def start(self) -> None:
        """A new forward."""
        self.ended, self.looked_up = False, ()

    def ids(self, ids: Tensor) -> Tensor:
        """Token ids that are looked up on all ranks."""
        self.looked_up = (*self.looked_up, ids.shape)
        return ids

    def enter_head(self, x: Tensor, where: str) -> Tensor:
        """The whole stream, for the head. Its tokens must be those that were looked up, in rows as they came."""
        whole = self.enter(x, where)
        tokens = whole.shape[:-1]
        if self.looked_up and tokens not in (*self.looked_up, *(torch.Size([i.numel()]) for i in self.looked_up)):
            raise PlaitError(
                f"{where!r} computes logits of {tuple(tokens)} (batch, tokens), but the ids that were looked up are "
                f"{tuple(self.looked_up[0])}: the model folds tokens into the batch or drops some; outside branches, "
                "the stream keeps its shape"
            )
        return whole

    def enter(self, x: Tensor, where: str) -> Tensor:
        """The whole stream, for ranks that each do a part of the work: their gradients of it are summed."""
        self._is_one(x, where)
        return self._move(x, self._lies(x), WHOLE, SUMMAND)

    def leave(self, x: Tensor, where: str) -> Tensor:
        """The sum of the ranks' results, back on the stream."""
        self._divides(x, where)
        return self._move(x, SUMMAND, self._lies(x), self._lies(x))

    def gather(self, x: Tensor, where: str) -> Tensor:
        """The whole stream, for ranks that all do the same work with it."""
        self._is_one(x, where)
        return self._move(x, self._lies(x), WHOLE, WHOLE)

    def scatter(self, x: Tensor, where: str) -> Tensor:
        """This rank's share of the stream, from what all ranks have."""
        self._divides(x, where)
        return self._move(x, WHOLE, self._lies(x), self._lies(x))

    def part(self, looked_up: Tensor, where: str) -> Tensor:
        """This rank's tokens of what all ranks looked up, such as positions: (B, T, D) or (T, D)."""
        if not self.sequence:
            return looked_up
        if looked_up.shape[-2] % self.axis.size():
            self._refuse_length(looked_up.shape[-2], where)
        return looked_up.chunk(self.axis.size(), dim=-2)[self.axis.get_local_rank()]

    def logits(self, x: Tensor, sharded: bool) -> Tensor:
        """From this rank's columns a DTensor sharded over the vocabulary, or all columns; a loss as it is."""
        self.ended = True
        if not x.dim():
            return x
        columns = DTensor.from_local(x, self.axis, [Shard(x.dim() - 1)], run_check=False)
        return columns if sharded else columns.redistribute(placements=[WHOLE]).to_local()

    def _lies(self, x: Tensor) -> Any:
        return Shard(x.dim() - 2) if self.sequence else WHOLE  # (B, T, D) or (T, D)

    def _move(self, x: Tensor, lies: Any, wanted: Any, gradient: Any) -> Tensor:
        found = DTensor.from_local(x, self.axis, [lies], run_check=False)
        return found.redistribute(placements=[wanted]).to_local(grad_placements=[gradient])

    def _divides(self, x: Tensor, where: str) -> None:
        self._is_one(x, where)
        if self.sequence and x.shape[-2] % self.axis.size():
            self._refuse_length(x.shape[-2], where)

    def _refuse_length(self, tokens: int, where: str) -> NoReturn:
        raise PlaitError(
            f"at {where!r} a sequence of {tokens} tokens is not divisible by strategy.tensor_parallel.degree="
            f"{self.axis.size()}, as strategy.tensor_parallel.sequence_parallel=true needs"
        ).at("strategy.tensor_parallel.degree", self.axis.size(), fits=f"a divisor of {tokens}")

    def _is_one(self, x: Tensor, where: str) -> None:
        if not x.is_floating_point():
            raise PlaitError(f"{where!r} got {x.dtype} as its first argument, which must be the residual stream")
        if self.sequence and x.dim() != 3:
            raise PlaitError(
                f"the residual stream has {x.dim()} dims at {where!r}, {tuple(x.shape)}; with "
                "strategy.tensor_parallel.sequence_parallel=true it must be (batch, tokens, width)"
            ).at("strategy.tensor_parallel.sequence_parallel", True, fits=(False,))


def wide(x: Tensor, width: int, where: str) -> Tensor:
    """`x`, with which a matrix with rows of `width` elements is called."""
    if x.shape[-1] != width:
        raise PlaitError(
            f"{where!r} is a divided matrix outside branches with rows of {width} elements, but its input has "
            f"{x.shape[-1]}: its output is along its columns; store it as nn.Linear does, or name its feed-forward as "
            "a branch"
        )
    return x


def same_tokens(y: Tensor, x: Tensor, where: str) -> Tensor:
    """`y`, which the branch `where` returns for `x`."""
    if y.shape[:-1] != x.shape[:-1]:
        raise PlaitError(
            f"the branch {where!r} returns {tuple(y.shape)} for a stream of {tuple(x.shape)}: what it returns is added "
            "to the stream, so it must have the same batch and tokens"
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


def wrap_forward(
    module: nn.Module,
    before: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Replace `module`'s first argument by `before(x)`, and its (first) result by `after(y, x)`, with x as `module`
    saw it."""
    name = next(iter(inspect.signature(module.forward).parameters))

    def change(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (before(args[0]), *args[1:]), kwargs  # type: ignore[misc]
        return args, {**kwargs, name: before(kwargs[name])}  # type: ignore[misc]

    def found(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        x = args[0] if args else kwargs[name]
        if isinstance(result, tuple):
            return (after(result[0], x), *result[1:])  # type: ignore[misc]
        return after(result, x)  # type: ignore[misc]

    if before is not None:
        module.register_forward_pre_hook(change, with_kwargs=True)
    if after is not None:
        module.register_forward_hook(found, with_kwargs=True)
