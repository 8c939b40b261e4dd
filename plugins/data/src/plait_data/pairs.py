"""Preferences to learn from: JSON lines with a chosen and a rejected answer, or with an answer and a label."""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from plait import Batch, Batches, PlaitError
from plait_data import conversations
from plait_data.cache import Progress
from plait_data.cached import silent
from plait_data.chat import Chat
from plait_data.conversation_batches import ConversationBatches
from plait_data.conversations import Tokens
from plait_data.documents import File, rows
from plait_data.order import digest64, epochs
from plait_data.preference_rows import Preference, gives, preferences
from plait_data.samples import nothing_held_out
from plait_data.template import Template
from plait_data.text_source import Say
from plait_data.validation_sets import WithSets

GROUP = 128  # rows that the tokenizer gets at once


@attrs.define(kw_only=True, slots=False)
class Pairs(Chat):
    """JSON lines, each an object with a prompt and two answers, or with an answer and its label. A sample is a row of
    the batch, so a pair is two samples, one after the other."""

    messages_key: str | None = attrs.field(init=False, default=None)

    @cached_property
    def gives(self) -> str:
        """What a loss learns from: the first row tells."""
        for where, row, _ in self._rows():
            return gives(row, where)
        raise PlaitError("the files have no rows").at("data.path")

    def _rows(self) -> Iterator[tuple[str, Any, int]]:
        return chain.from_iterable(map(rows, self.files()))

    def check_rows(self, file: File) -> None:
        next(preferences(islice(self._rows(), 2), self.gives), None)

    def key(self, files: list[File]) -> tuple[Any, ...]:
        return "pairs", *super().key(files)[1:]

    def is_complete(self, folder: Path) -> bool:
        return super().is_complete(folder) and (folder / "marks.bin").is_file()

    def write(self, files: list[File], folder: Path, say: Say) -> None:
        template = Template(Path(self.tokenizer).expanduser(), self._template)
        progress = Progress(say, "tokenising", sum(file.size for file in files))
        others: Counter[str] = Counter()
        kind, left, marks = self.gives, 0, list[int]()
        each = preferences((one for file in files for one in self._read(file, others)), kind)
        with conversations.TokenFiles(folder) as kept:
            while group := list(islice(each, GROUP)):
                for one, encoded in zip(group, _encoded(template, group), strict=True):
                    if not all(answers[1:].any() for _, answers in encoded):
                        left += 1
                        continue
                    key = digest64(b"".join(ids.tobytes() for ids, _ in encoded))  # held out together
                    for (ids, answers), mark in zip(encoded, one.marks, strict=True):
                        kept.add(ids, answers, key)
                        marks.append(mark)
                progress.add(sum(one.size for one in group))
        if not marks:
            raise PlaitError(f"{files[0].path}: no row has two different answers to learn from")
        np.array(marks, np.int64).tofile(folder / "marks.bin")
        kept.finish()
        without = f"; left out {left:,} whose answers are empty or alike" if left else ""
        say(f"{kept.tokens:,} tokens in {len(marks) // 2:,} {kind}, {kept.learned:,} of them to compare{without}")
        for line in conversations.told(template, others):
            say(line)

    def _read(self, file: File, others: Counter[str]) -> Any:
        for where, row, size in rows(file):
            others.update(row.keys() - {"prompt", "chosen", "rejected", "completion", "label", "tools"})
            yield where, row, size

    def check_length(self, *, seq_len: int) -> None:
        self.of_sets(lambda each: each.check_length(seq_len=seq_len))
        for name, kind in self.of_sets(lambda each: getattr(each, "gives", "nothing")).items():
            if kind != self.gives:
                raise PlaitError(
                    f"data.path gives {self.gives}, but the set to validate on {name!r} gives {kind}: take one kind"
                ).at("data.validation_path", name)
        tokens = conversations.read(self.folder)
        held, fit = self._held(tokens.keys), _fit(tokens, seq_len)
        if held.all():
            raise PlaitError(
                f"data has {len(held) // 2} rows, of which data.validation_fraction={self.validation_fraction:g} holds "
                "out all: take more, or data.validation_fraction=0"
            ).at("data.validation_fraction", self.validation_fraction, fits="0")
        for name, part in {"to train on": ~held[0::2], "held out for validation": held[0::2]}.items():
            if part.any() and not (part & fit).any():
                least = int(tokens.answers.reshape(-1, 2).max(1)[part].min())
                raise PlaitError(
                    f"of the rows {name} none has answers that begin within train.seq_len={seq_len} tokens; the first "
                    f"does with train.seq_len={least}"
                ).at("train.seq_len", seq_len, fits=f"at least {least}")

    def shortened(self, *, seq_len: int) -> str:
        tokens = conversations.read(self.folder)
        longest = tokens.lengths.astype(np.int64).reshape(-1, 2).max(1)
        out = ~_fit(tokens, seq_len)
        cut = ~out & (longest > seq_len + 1)
        if not (out.any() or cut.any()):
            return ""
        return (
            f"train.seq_len={seq_len} is too short for some of {len(out):,} rows: {int(out.sum()):,} left out, as an "
            f"answer does not begin in time, and {int(cut.sum()):,} cut; the longest needs "
            f"train.seq_len={int(longest.max()) - 1}"
        )

    def open(self, *, seq_len: int, seed: int, global_batch_size: int, dp: tuple[int, int]) -> Batches:
        shape: dict[str, Any] = {"seq_len": seq_len, "seed": seed, "global_batch_size": global_batch_size, "dp": dp}
        self.prepare(silent)  # the parent has done it, unless the cache was removed since
        self.check_length(seq_len=seq_len)
        tokens = conversations.read(self.folder)
        marks = np.fromfile(self.folder / "marks.bin", np.int64)
        own = PairBatches(tokens, marks, self._held(tokens.keys)[0::2], self.encoder.eod, **shape)
        sets: dict[str, Any] = self.of_sets(lambda each: each.open(**shape))
        for each in sets.values():
            each.first, own.texts = own.texts, own.texts + each.texts
        if not sets:
            return own
        joined = WithSets(own, sets)
        joined.texts = own.texts
        return joined


class PairBatches(ConversationBatches):
    """Rows of one conversation each, filled up; rows 2i and 2i + 1 belong together. Pairs come epoch after epoch, each
    a permutation of all.

    first: the number of the first text.
    """

    def __init__(
        self,
        tokens: Tokens,
        marks: np.ndarray,
        held: np.ndarray,
        pad: int,
        seq_len: int,
        seed: int,
        global_batch_size: int,
        dp: tuple[int, int],
    ) -> None:
        super().__init__(tokens, pad, seq_len, seed, global_batch_size, dp)
        if len(self.rows) % 2:
            raise PlaitError(
                f"train.global_batch_size={global_batch_size} on {dp[1]} data ranks parts the two rows of a pair: take "
                f"a multiple of {2 * dp[1]}"
            ).at("train.global_batch_size", global_batch_size, fits=f"a multiple of {2 * dp[1]}")
        self._marks = marks
        fit = _fit(tokens, seq_len)
        self._train, self._validation = np.flatnonzero(fit & ~held), np.flatnonzero(fit & held)
        self.epoch, self.texts, self.first = 2 * len(self._train), len(marks), 0

    def take(self, first: int) -> Batch:
        samples = first + self.rows
        pairs = epochs(samples // 2, len(self._train), self._seed)
        return self._batch(2 * self._train[pairs] + samples % 2)

    def validation(self, index: int) -> Batch:
        if not len(self._validation):
            raise nothing_held_out()
        samples = index * self.global_batch_size + self.rows
        return self._batch(2 * self._validation[samples // 2 % len(self._validation)] + samples % 2)

    def held_out(self, name: str = "") -> int:
        return 2 * len(self._validation)

    def _batch(self, texts: np.ndarray) -> Batch:
        tokens, labels = self._empty(len(texts))
        for row, text in enumerate(texts.tolist()):
            self._put(text, tokens[row], labels[row])
        numbers = {"marks": torch.from_numpy(self._marks[texts]), "texts": torch.from_numpy(self.first + texts)}
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), **numbers)


def _fit(tokens: Tokens, seq_len: int) -> np.ndarray:
    """Whether both answers of each pair (n,) begin within a row."""
    return np.all(tokens.answers.reshape(-1, 2) <= seq_len, axis=1)


def _encoded(template: Template, group: list[Preference]) -> list[tuple[tuple[np.ndarray, np.ndarray], ...]]:
    """(ids, learned) of both conversations of each."""
    found = template.encode([each for one in group for each in one.rows])
    return list(zip(found[0::2], found[1::2], strict=True))
