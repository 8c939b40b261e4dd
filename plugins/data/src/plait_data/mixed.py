"""Batches of a mixture: each row from the source whose turn it is."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from plait import Batch, Batches, PlaitError
from plait_data.bins import Bins
from plait_data.inner import tells_apart
from plait_data.packed import PackedBatches
from plait_data.shares import Shares


class Mixed(Batches):
    """Of sources with random access, the number of a sample decides what its row holds. A stream gives its samples in
    order, in each part of the mixture those of its own part.

    members: name -> source. opened: (name, global batch size, (index, count) of the data rank) -> the source's batches.
    epoch: samples of the mixture's own epoch, if it has one. used: names of the sources that give samples.
    """

    def __init__(
        self,
        members: Mapping[str, Any],
        opened: Callable[[str, int, tuple[int, int]], Batches],
        shares: Shares,
        epoch: int | None,
        seq_len: int,
        global_batch_size: int,
        dp: tuple[int, int],
        used: Sequence[str],
    ) -> None:
        super().__init__(seq_len, global_batch_size, dp)
        self.epoch, self.sources, self._shares = epoch, tuple(members), shares
        self._positions = any(map(tells_apart, members.values()))
        # One sample at a time, because a step takes now more of a source, now fewer.
        self._batches = {
            name: opened(name, 1, (0, 1)) if one.indexable else opened(name, dp[1], dp) for name, one in members.items()
        }
        self._streams = {name: 0 for name, one in members.items() if not one.indexable}  # samples of this part
        held = [name for name in used if members[name].has_validation]
        self._held = {name: opened(name, 1, (0, 1)) if name in self._streams else self._batches[name] for name in held}
        weights = [w if name in held else 0 for name, w in zip(members, shares.last, strict=True)]
        self._held_shares = Shares([(0, weights)]) if held else None

    def take(self, first: int) -> Batch:
        chosen = self._shares.samples(first + int(self.rows[0]), len(self.rows))
        samples: dict[int, list[int]] = {}  # source -> consecutive samples
        for number, sample in chosen:
            samples.setdefault(number, []).append(sample)
        given = {number: iter(self._taken(self.sources[number], own)) for number, own in samples.items()}
        return self._joined([(number, next(given[number])) for number, _ in chosen])

    def _taken(self, name: str, samples: list[int]) -> list[Batch]:
        """Each of these consecutive samples of a source; of a stream, as many of its next ones."""
        batches = self._batches[name]
        if name in self._streams:
            before = self._streams[name]
            self._streams[name] += len(samples)
            return [batches.take((before + one) * self.dp[1]) for one in range(len(samples))]
        if isinstance(batches, PackedBatches | Bins):  # at once, which is faster
            several = copy.copy(batches)
            several.rows = np.arange(len(samples))
            return several.take(samples[0]).split(1)
        return [batches.take(sample) for sample in samples]

    def validation(self, index: int) -> Batch:
        if self._held_shares is None:
            raise PlaitError(
                "nothing is held out for validation: set it for a source of data.sources, or validation.interval=0"
            ).at("data.sources", fits="a source with held-out data")
        first = index * self.global_batch_size + int(self.rows[0])
        chosen = self._held_shares.samples(first, len(self.rows))
        return self._joined([(number, self._held[self.sources[number]].validation(at)) for number, at in chosen])

    def passes(self, samples: int) -> dict[str, float]:
        lengths = {name: getattr(self._batches[name], "epoch", None) for name in self.sources}
        given = zip(self.sources, self._shares.expected(samples), strict=True)
        each = {f"epoch/{name}": count / length for name, count in given if (length := lengths[name])}
        return super().passes(samples) | each

    def _joined(self, rows: list[tuple[int, Batch]]) -> Batch:
        """One batch of batches of one row, each with the number of its source."""
        tokens, labels = (torch.cat([getattr(each, name) for _, each in rows]) for name in ("tokens", "labels"))
        positions = None
        if self._positions:
            plain = torch.arange(self.seq_len)[None]
            positions = torch.cat([plain if each.positions is None else each.positions for _, each in rows])
        return Batch(tokens, labels, positions, torch.tensor([number for number, _ in rows]))

    def state_dict(self) -> dict[str, Any]:
        """Of the streams; `{}` if there are none."""
        states = {name: self._batches[name].state_dict() for name in self._streams}
        return {"given": dict(self._streams), "states": states} if states else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._streams:
            return
        if state.get("given", {}).keys() != self._streams.keys():
            raise PlaitError(
                f"the checkpoint holds no place in the mixture's streams {', '.join(self._streams)}: keep its sources"
            ).at("data.sources", self.sources)
        self._streams = {name: int(count) for name, count in state["given"].items()}
        for name, each in state["states"].items():
            self._batches[name].load_state_dict(each)

    def left_out(self) -> str:
        lines = {name: getattr(self._batches[name], "left_out", str)() for name in self._streams}
        return "; ".join(f"{name}: {line}" for name, line in lines.items() if line)
