"""Data sources that note which samples every share takes to train on: `<share>-of-<count>.jsonl` in `notes`."""

import json
from pathlib import Path
from typing import Any

import attrs

from plait_data import stream
from plait_data.hf import Hf
from plait_data.text import Text

Sample = tuple[int, ...]


@attrs.define(kw_only=True, slots=False)
class RecordedText(Text):
    notes: str = ""

    def open(self, **options: Any) -> Any:
        return _noting(super().open(**options), Path(self.notes), options["dp"])


@attrs.define(kw_only=True, slots=False)
class RecordedHf(Hf):
    notes: str = ""

    def open(self, **options: Any) -> Any:
        stream.DEPTH = 8  # else reading ahead goes through many epochs of a small file, which takes long
        return _noting(super().open(**options), Path(self.notes), options["dp"])


def _noting(batches: Any, notes: Path, dp: tuple[int, int]) -> Any:
    take = batches.take

    def noting(first: int) -> Any:
        batch = take(first)
        with open(notes / f"{dp[0]}-of-{dp[1]}.jsonl", "a") as file:
            file.write(json.dumps(rows(batch)) + "\n")
        return batch

    batches.take = noting
    return batches


def rows(batch: Any) -> list[Sample]:
    """The token ids of each sample of a batch, the last label too."""
    return [(*tokens, labels[-1]) for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)]


def noted(notes: Path, count: int) -> list[list[list[Sample]]]:
    """Of every share of `count`, the batches that it took, in order; the notes are gone then."""
    shares = []
    for index in range(count):
        file = notes / f"{index}-of-{count}.jsonl"
        shares.append([[tuple(row) for row in json.loads(line)] for line in file.read_text().splitlines()])
        file.unlink()
    assert not list(notes.iterdir()), "another number of shares took part"
    return shares


def in_a_row(shares: list[list[list[Sample]]]) -> list[Sample]:
    """The samples of all global batches, one after the other."""
    return [row for parts in zip(*shares, strict=True) for part in parts for row in part]
