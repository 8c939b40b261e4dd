"""Batches from a stream of documents, with a state that restores it exactly.

The state is a cursor, not a buffer: which document holds the first token of the next sample, and where in it. To
continue from there, at most `shuffle_buffer` documents are read again.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import attrs
import numpy as np

from plait import Batch, Batches, PlaitError
from plait_data.left_out import ENDS, LeftOut
from plait_data.order import digest64, shuffled
from plait_data.prefetch import Prefetched
from plait_data.samples import to_batch, windows
from plait_data.tokenizer import Tokenizer

DEPTH = 256  # documents that are tokenised ahead
GROUP = 16  # documents that the tokenizer gets at once, to spread over its threads


class RowSource(Protocol):
    """Where a stream's documents come from, as `plait_data.hf.Hf` describes it."""

    name: str
    split: str
    shuffle_buffer: int
    validation_split: str | None
    validation_documents: int
    attention: str

    @property
    def encoder(self) -> Tokenizer: ...

    @property
    def holds_out(self) -> bool: ...

    def fingerprint(self) -> str: ...

    def rows(self, split: str) -> Any: ...

    def texts(self, split: str, rows: Any = None, lost: LeftOut | None = None) -> Iterator[bytes]: ...

    def validation_texts(self) -> Iterator[bytes]: ...


@attrs.frozen
class Cursor:
    """A document: number `index`, after shuffling, in block number `block` of an epoch.

    state: the state of the data set before that block; None at the start of an epoch.
    """

    epoch: int = 0
    block: int = 0
    index: int = 0
    state: dict[str, Any] | None = None


@attrs.frozen
class Document:
    cursor: Cursor
    tokens: np.ndarray  # (n,), the end token last


class StreamBatches(Batches):
    """Part `dp` of a stream, packed on the way; `take` must be called in order.

    Sample numbers count what all parts have given together.
    """

    def __init__(self, source: RowSource, seq_len: int, seed: int, global_batch_size: int, dp: tuple[int, int]) -> None:
        super().__init__(seq_len, global_batch_size, dp)
        self._source, self._seed, self._samples = source, seed, 0
        self._start, self._offset = Cursor(), 0  # of the next sample's first token: its document, and where in it
        self._pending: deque[Document] = deque()  # from that document on
        self._documents: Prefetched[Document] | None = None
        self._validation = _Held(source, seq_len) if source.holds_out else None
        self._lost = LeftOut()

    def take(self, first: int) -> Batch:
        if first != self._samples:
            raise ValueError(f"a stream gives samples in order: number {self._samples} comes next, not {first}")
        samples = self._next(len(self.rows))
        self._samples += self.global_batch_size
        return to_batch(samples, self._source.encoder.eod, self._source.attention)

    def validation(self, index: int) -> Batch:
        if self._validation is None:
            raise PlaitError(
                "nothing is held out for validation: set data.validation_split or data.validation_documents, "
                "or validation.interval=0"
            ).at("data.validation_split", fits="a split to validate on")
        samples = self._validation.samples((index + 1) * self.global_batch_size)
        wanted = (index * self.global_batch_size + self.rows) % len(samples)
        return to_batch(samples[wanted], self._source.encoder.eod, self._source.attention)

    def left_out(self) -> str:
        """Of what was read, some documents ahead of the last batch included."""
        line = self._lost.line()
        return line and f"data: of the rows in part {self.dp[0]} of {self.dp[1]}, Plait {line}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": self._samples,
            "share": list(self.dp),
            "seed": self._seed,
            "source": self._source.fingerprint(),
            "start": attrs.asdict(self._start),
            "offset": self._offset,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self._load(state)
        except (KeyError, TypeError, IndexError) as error:
            raise PlaitError(f"the checkpoint's state of the stream is not one that Plait writes: {error}") from error

    def _load(self, state: Mapping[str, Any]) -> None:
        count, seed = state["share"][1], state["seed"]
        if count != self.dp[1]:
            raise PlaitError(
                f"a stream resumes only in as many parts as it was saved in: {count} then, {self.dp[1]} now"
            )
        if state["share"][0] != self.dp[0]:
            raise ValueError(f"this is the state of part {state['share'][0]}, not of part {self.dp[0]}")
        if seed != self._seed or state["source"] != self._source.fingerprint():
            what = f"train.seed={seed}" if seed != self._seed else "the same data options"
            raise PlaitError(
                f"a stream resumes only with {what}, as it was saved; "
                "checkpoint.init_from starts on other data from the weights alone"
            )
        if self._documents is not None:
            self._documents.close()
        self._documents = None
        self._pending.clear()
        self._samples, self._start, self._offset = state["samples"], Cursor(**state["start"]), state["offset"]

    def _next(self, rows: int) -> np.ndarray:
        """The next samples (rows, T + 1); moves the cursor behind them."""
        if self._documents is None:
            self._documents = Prefetched(_documents(self._source, self._seed, self.dp, self._start, self._lost), DEPTH)
        length = rows * self.seq_len
        ready = sum(len(document.tokens) for document in self._pending) - self._offset
        while ready < length + 1:
            self._pending.append(next(self._documents))
            ready += len(self._pending[-1].tokens)
        tokens = np.concatenate([document.tokens for document in self._pending])[self._offset :]
        self._offset += length
        while self._offset >= len(self._pending[0].tokens):  # at least one token is left, the last of these samples
            self._offset -= len(self._pending.popleft().tokens)
        self._start = self._pending[0].cursor
        return windows(tokens[: length + 1], self.seq_len)


class _Held:
    """The held-out samples: the same on every rank, read as far as they are requested."""

    def __init__(self, source: RowSource, seq_len: int) -> None:
        self._source, self._seq_len = source, seq_len
        self._texts: Iterator[bytes] | None = None
        self._tokens = np.empty(0, np.uint32)

    def samples(self, least: int) -> np.ndarray:
        """All samples read so far (n, T + 1): `least` of them, or as many as there are."""
        if self._texts is None:
            self._texts = filter(None, self._source.validation_texts())
        parts = [self._tokens]
        missing = least * self._seq_len + 1 - len(self._tokens)
        while missing > 0 and (text := next(self._texts, None)) is not None:
            parts.append(_tokens(self._source, [text])[0])
            missing -= len(parts[-1])
        self._tokens = np.concatenate(parts)
        samples = windows(self._tokens, self._seq_len)
        if not len(samples):
            raise PlaitError(
                f"the stream's validation documents have {len(self._tokens)} tokens, and one sample of "
                f"train.seq_len={self._seq_len} takes {self._seq_len + 1}: raise data.validation_documents"
            ).at("data.validation_documents", self._source.validation_documents, fits="more")
        return samples


def _tokens(source: RowSource, texts: list[bytes]) -> list[np.ndarray]:
    begin, end = np.array(source.encoder.begins, np.uint32), np.array([source.encoder.eod], np.uint32)
    return [np.concatenate((begin, ids.astype(np.uint32), end)) for ids in source.encoder.encode(texts)]


def _documents(source: RowSource, seed: int, dp: tuple[int, int], start: Cursor, lost: LeftOut) -> Iterator[Document]:
    """The part's documents from `start` on, without end."""
    held = set()
    if source.holds_out and source.validation_split is None:
        held = {digest64(text) for text in source.validation_texts()}
    epoch, first = start.epoch, start
    while True:
        count = 0
        for cursor, texts in _blocks(source, seed, dp, attrs.evolve(first, epoch=epoch), lost):
            order = shuffled(np.arange(len(texts)), len(texts), seed, cursor.epoch, cursor.block)[cursor.index :]
            wanted = [
                (attrs.evolve(cursor, index=cursor.index + number), texts[at])
                for number, at in enumerate(order.tolist())
                if texts[at] and digest64(texts[at]) not in held
            ]
            count += len(wanted)
            for at in range(0, len(wanted), GROUP):
                group = wanted[at : at + GROUP]
                for (document, _), tokens in zip(group, _tokens(source, [text for _, text in group]), strict=True):
                    lost.add(ENDS, int(np.count_nonzero(tokens == source.encoder.eod)) - 1)
                    yield Document(document, tokens)
        if not count and first == Cursor():
            raise PlaitError(
                f"data.name={source.name} has no documents to train on in part {dp[0]} of {dp[1]}, "
                f"besides the {len(held)} held out for validation"
            ).at("data.name", source.name)
        epoch, first = epoch + 1, Cursor()


def _blocks(
    source: RowSource, seed: int, dp: tuple[int, int], start: Cursor, lost: LeftOut
) -> Iterator[tuple[Cursor, list[bytes]]]:
    """The rest of an epoch, `shuffle_buffer` documents at a time, each block with the index to begin at."""
    from datasets.distributed import split_dataset_by_node

    rows = split_dataset_by_node(source.rows(source.split), rank=dp[0], world_size=dp[1])
    rows.set_epoch(digest64(repr((seed, start.epoch)).encode()) >> 33)  # shuffles the order of its files
    if start.state is not None:
        rows.load_state_dict(start.state)
    iterator = source.texts(source.split, rows, lost)
    cursor = start
    while texts := list(islice(iterator, source.shuffle_buffer)):
        yield cursor, texts
        cursor = Cursor(start.epoch, cursor.block + 1, 0, rows.state_dict())
