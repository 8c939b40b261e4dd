"""Moves the residual stream into and out of sharded modules: torch's redistribution of DTensors, both directions.

Between these functions tensors are plain: a rank's own heads, its own part of a feed-forward. So no DTensor passes
through a model's code, and everything that crosses ranks is here.
"""

from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plait import PlaitError
from plait_tensor_parallel.degrees import KEY

WHOLE, SUMMAND = Replicate(), Partial()
SEQUENCE = f"{KEY}.sequence_parallel"


@attrs.define(eq=False)
class ResidualStream:
    """The layout of the residual stream on the ranks of `axis`: sharded along the sequence, or the same on all.

    axis: 1-D DeviceMesh. sequence: whether a rank holds only its share of the sequence.
    ended: whether all ranks already have the logits in the current forward: what follows is the same on all.
    looked_up: the shapes of all token ids that were looked up in the current forward.
    last: the module that moved the stream last in the current forward. inside: whether it, such as a branch, still
    runs. Both are of uncompiled modules.

    `where` is the module that reads or writes the stream, for errors.
    """

    axis: Any
    sequence: bool
    ended: bool = False
    looked_up: tuple[torch.Size, ...] = ()
    last: str = ""
    inside: bool = False

    def start(self) -> None:
        """A new forward."""
        self.ended, self.looked_up, self.last, self.inside = False, (), "", False

    def ids(self, ids: Tensor) -> Tensor:
        """Token ids that are looked up on all ranks."""
        self.looked_up = (*self.looked_up, ids.shape)
        return ids

    def enter_head(self, x: Tensor, where: str) -> Tensor:
        """The whole stream, for the head. Its tokens must be those that were looked up, in rows as they came."""
        whole = self.enter(x, where)
        tokens = whole.shape[:-1]
        if self.looked_up and tokens not in (*self.looked_up, *(torch.Size([i.numel()]) for i in self.looked_up)):
            instead = f"; {SEQUENCE}=false gives each rank all tokens" if self.sequence else ""
            error = PlaitError(
                f"{where!r} computes logits of {tuple(tokens)} (batch, tokens), but the ids that were looked up are "
                f"{tuple(self.looked_up[0])}: the model folds tokens into the batch or drops some; outside branches, "
                f"the stream keeps its shape{instead}"
            )
            raise error.at(SEQUENCE, True, fits=(False,)) if self.sequence else error
        return whole

    def enter(self, x: Tensor, where: str) -> Tensor:
        """The whole stream, for ranks that each do a part of the work: their gradients of it are summed."""
        self._is_one(x, where)
        self._note(where, inside=True)
        return self._move(x, self._lies(x), WHOLE, SUMMAND)

    def leave(self, x: Tensor, where: str) -> Tensor:
        """The sum of the ranks' results, back on the stream."""
        self._divides(x, where)
        self._note(where, inside=False)
        return self._move(x, SUMMAND, self._lies(x), self._lies(x))

    def gather(self, x: Tensor, where: str) -> Tensor:
        """The whole stream, for ranks that all do the same work with it."""
        self._is_one(x, where)
        self._note(where, inside=True)
        return self._move(x, self._lies(x), WHOLE, WHOLE)

    def scatter(self, x: Tensor, where: str) -> Tensor:
        """This rank's share of the stream, from what all ranks have."""
        self._divides(x, where)
        self._note(where, inside=False)
        return self._move(x, WHOLE, self._lies(x), self._lies(x))

    def part(self, looked_up: Tensor, where: str) -> Tensor:
        """This rank's tokens of what all ranks looked up, such as positions: (B, T, D) or (T, D)."""
        if not self.sequence:
            return looked_up
        if looked_up.shape[-2] % self.axis.size():
            self._refuse_length(looked_up.shape[-2], where)
        self._note(where, inside=False)
        share = looked_up.shape[-2] // self.axis.size()
        return looked_up.narrow(-2, share * self.axis.get_local_rank(), share)  # `chunk` could not be written to

    def logits(self, x: Tensor, sharded: bool) -> Tensor:
        """From this rank's columns a DTensor sharded over the vocabulary, or all columns; a loss as it is."""
        self.ended = True
        if not x.dim():
            return x
        columns = DTensor.from_local(x, self.axis, [Shard(x.dim() - 1)], run_check=False)
        return columns if sharded else columns.redistribute(placements=[WHOLE]).to_local()

    def _note(self, where: str, inside: bool) -> None:
        if not torch.compiler.is_compiling():  # a graph of one block would otherwise hold its name, and fit no other
            self.last, self.inside = where, inside

    def _lies(self, x: Tensor) -> Any:
        return Shard(x.dim() - 2) if self.sequence else WHOLE  # (B, T, D) or (T, D)

    def _move(self, x: Tensor, lies: Any, wanted: Any, gradient: Any) -> Tensor:
        on_axis = DTensor.from_local(x, self.axis, [lies], run_check=False)
        return on_axis.redistribute(placements=[wanted]).to_local(grad_placements=[gradient])

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
                f"the residual stream has {x.dim()} dims at {where!r}, {tuple(x.shape)}; with {SEQUENCE}=true it must "
                f"be (batch, tokens, width), {SEQUENCE}=false leaves its shape to the model"
            ).at(SEQUENCE, True, fits=(False,))
