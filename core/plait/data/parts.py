"""A stream in a fixed number of parts, which any number of data ranks read together."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from plait.contract.batch import Batch
from plait.contract.config import Train
from plait.contract.errors import PlaitError
from plait.data.batches import Batches
from plait.data.source import blaming_source


def open_batches(source: Any, train: Train, global_batch_size: int, dp: tuple[int, int]) -> tuple[Batches, int]:
    """(the batches of data rank `dp` = (index, count) of a run, the number of parts in which a stream is read; 0 if any
    batch is available at any time)."""
    shape = {"seq_len": train.seq_len, "global_batch_size": global_batch_size}
    opens = functools.partial(source.open, seed=train.seed, **shape)
    if train.ramp:
        from plait.data.ramp import Ramp  # imported only by runs that need it
        from plait.data.ramped import Ramped

        def opened(size: int) -> Batches:
            with blaming_source(source, "open"):
                return opens(dp=dp, global_batch_size=size)

        return Ramped(opened, Ramp.of(train, global_batch_size)), 0
    parts = 0 if source.indexable else train.data_parts or dp[1]
    with blaming_source(source, "open"):
        return InParts(lambda part: opens(dp=part), parts, dp=dp, **shape) if parts else opens(dp=dp), parts


class InParts(Batches):
    """One data rank's part of a stream that has `count` parts, each with a place of its own.

    Every part gives `G / count` rows of a global batch, part 0 the first, so the number of data ranks changes no batch.
    A part whose rows several ranks need is read by each of them.

    opened((part, count)): the batches of a part, as `Source.open` returns them for one of `count` data ranks.
    """

    def __init__(
        self,
        opened: Callable[[tuple[int, int]], Batches],
        count: int,
        seq_len: int,
        global_batch_size: int,
        dp: tuple[int, int],
    ) -> None:
        super().__init__(seq_len, global_batch_size, dp)
        self.count, (rows, rest) = count, divmod(global_batch_size, count)
        if rest:
            raise unshared(global_batch_size, count)
        first, last = int(self.rows[0]), int(self.rows[-1]) + 1
        self._parts = {part: opened((part, count)) for part in range(first // rows, (last - 1) // rows + 1)}
        one = next(iter(self._parts.values()))
        self.sources, self.validation_sets = (getattr(one, name, ()) for name in ("sources", "validation_sets"))
        self._rows = {part: slice(max(first - part * rows, 0), min(last - part * rows, rows)) for part in self._parts}

    def take(self, first: int) -> Batch:
        return self._rows_of(lambda part: part.take(first))

    def passes(self, samples: int) -> dict[str, float]:
        own: Callable[[int], dict[str, float]] = getattr(next(iter(self._parts.values())), "passes", super().passes)
        return own(samples)

    def validation(self, index: int) -> Batch:
        return self._rows_of(lambda part: part.validation(index))

    def validation_of(self, name: str, index: int) -> Batch:
        return self._rows_of(lambda part: part.validation_of(name, index))

    def held_out(self, name: str = "") -> int | None:
        return next(iter(self._parts.values())).held_out(name)

    def _rows_of(self, given: Callable[[Batches], Batch]) -> Batch:
        batches = [(given(part), self._rows[number]) for number, part in self._parts.items()]
        columns = zip(*((b.tokens, b.labels, b.positions, b.sources) for b, _ in batches), strict=True)
        slices = [rows for _, rows in batches]
        return Batch(*(_joined(column, slices) for column in columns))

    def state_dict(self) -> dict[str, Any]:
        """Number -> state of each part that this rank reads. `load_state_dict` takes those, and any others."""
        return {str(number): part.state_dict() for number, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if str(self.count) in state or not self.state_dict().keys() <= state.keys():
            raise PlaitError(
                f"the checkpoint's stream was not read in as many parts as train.data_parts={self.count} says"
            ).at("train.data_parts", self.count, fits="the checkpoint's number")
        for number, part in self._parts.items():
            part.load_state_dict(state[str(number)])

    def left_out(self) -> str:
        """Of the first part of this rank."""
        own: Callable[[], str] = getattr(next(iter(self._parts.values())), "left_out", str)  # a stranger's may lack it
        return own()


def unshared(size: int, count: int) -> PlaitError:
    return PlaitError(
        f"train.global_batch_size={size} cannot be divided among the {count} parts in which the stream is read "
        f"(train.data_parts): take a multiple of {count}"
    ).at("train.global_batch_size", size, fits=f"a multiple of {count}")


def _joined(column: Any, slices: list[slice]) -> Any:
    return None if column[0] is None else torch.cat([each[rows] for each, rows in zip(column, slices, strict=True)])
