"""Encodes documents on all cores, and gives their ids in the documents' order."""

import math
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

import attrs
import numpy as np

from plait import PlaitError
from plait.host import can_fork, cores, processes
from plait_data.documents import File, pieces
from plait_data.left_out import LeftOut
from plait_data.order import digest64
from plait_data.tokenizer import Tokenizer
from plait_data.windows import Joined, Part, Window, windows
from plait_data.windows import encode as encode_windows

GROUP = 1 << 19  # bytes of text that a core gets at once
AHEAD = 2  # groups per core that are read, and not yet taken


@attrs.frozen
class TextGroup:
    """Documents, or pieces of long ones, in order.

    held: whether each one's document is for validation. first, last: whether its document begins and ends with it.
    windows: what each is encoded in if it is a piece, and else None. read: bytes that were read for them.
    """

    texts: list[bytes] = attrs.Factory(list)
    held: list[bool] = attrs.Factory(list)
    first: list[bool] = attrs.Factory(list)
    last: list[bool] = attrs.Factory(list)
    windows: list[Window | None] = attrs.Factory(list)
    read: list[int] = attrs.Factory(list)


@attrs.frozen
class Encoded:
    """The ids of a group, with those that begin and end documents: to train on, and held out. read: the group's.

    ends: how often a text itself became the token that ends documents.
    """

    train: np.ndarray
    held: np.ndarray
    read: int
    ends: int = 0


def held_out(text: bytes, fraction: float) -> bool:
    """Whether a document that begins like this is for validation: by content, so equal documents are on one side."""
    return digest64(text) < fraction * 2.0**64


def encoded(
    files: list[File], text_key: str, tokenizer: Tokenizer, fraction: float, lost: LeftOut | None = None
) -> Generator[Encoded, None, None]:
    """All documents of `files`, by as many processes as there are cores, or by the tokenizer's own threads.

    lost: counts what is no document. Close it if it is not taken to its end. Memory is that of a few groups for each
    core. Raises PlaitError for an invalid document, or if a process is killed.
    """
    join = _Join(tokenizer)
    if tokenizer.cheap or not can_fork():
        size = GROUP if tokenizer.cheap else GROUP * cores()  # for all threads at once
        for group in _groups(files, text_key, fraction, size, lost, not tokenizer.cheap):
            yield join(group, _encode(tokenizer, group))
        return
    workers = min(cores(), math.ceil(sum(file.size for file in files) / GROUP))
    waiting: deque[tuple[TextGroup, Future[list[Documents | Part]]]] = deque()
    try:
        with processes(workers, _begin, tokenizer) as pool:
            for group in _groups(files, text_key, fraction, GROUP, lost, True):
                waiting.append((group, pool.submit(_of_worker, group)))
                if len(waiting) == AHEAD * workers:
                    group, encoded = waiting.popleft()
                    yield join(group, encoded.result())
            while waiting:
                group, encoded = waiting.popleft()
                yield join(group, encoded.result())
    except BrokenProcessPool as error:
        raise PlaitError(
            "a process that turned text into tokens was killed, perhaps because memory ran out; fewer cores "
            "(taskset) need less"
        ) from error


def _groups(
    files: list[File], text_key: str, fraction: float, size: int, lost: LeftOut | None, in_windows: bool
) -> Iterator[TextGroup]:
    group, filled, out = TextGroup(), 0, False
    for file in files:
        texts = pieces(file, text_key, lost)
        for piece, window in windows(texts) if in_windows else ((piece, None) for piece in texts):
            out = held_out(piece.text, fraction) if piece.first else out
            group.texts.append(piece.text)
            group.held.append(out)
            group.first.append(piece.first)
            group.last.append(piece.last)
            group.windows.append(window)
            group.read.append(piece.read)
            filled += len(piece.text)
            if filled >= size:
                yield group
                group, filled = TextGroup(), 0
    if group.texts:
        yield group


@attrs.frozen
class Documents:
    """The ids of whole documents: to train on, and held out. ends: as `Encoded.ends`."""

    train: np.ndarray
    held: np.ndarray
    ends: int


def _encode(tokenizer: Tokenizer, group: TextGroup) -> list[Documents | Part]:
    """The ids of a group in order: of all documents between two pieces together, and of each piece."""
    found: list[Documents | Part] = []
    parts = iter(encode_windows(tokenizer, [window for window in group.windows if window is not None]))
    start = 0
    for at, window in enumerate([*group.windows, Window("", 0, 0)]):
        if window is not None:
            if at > start:
                found.append(_documents(tokenizer, group, slice(start, at)))
            found += islice(parts, 1)
            start = at + 1
    return found


def _documents(tokenizer: Tokenizer, group: TextGroup, some: slice) -> Documents:
    dtype = id_dtype(tokenizer)
    begin, end, none = _around(tokenizer, dtype)
    sides: list[list[np.ndarray]] = [[none], [none]]
    ids_of = tokenizer.encode(group.texts[some])
    for ids, held, first, last in zip(ids_of, group.held[some], group.first[some], group.last[some], strict=True):
        sides[held] += [begin if first else none, ids, end if last else none]
    train, held_ids = (np.concatenate(side).astype(dtype, copy=False) for side in sides)
    ends = sum(int(np.count_nonzero(side == tokenizer.eod)) for side in (train, held_ids))
    return Documents(train, held_ids, ends - sum(group.last[some]))


def _around(tokenizer: Tokenizer, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What begins a document, what ends one, and nothing."""
    return np.array(tokenizer.begins, dtype), np.array([tokenizer.eod], dtype), np.empty(0, dtype)


class _Join:
    """What was encoded of each group, in order, as documents."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = Joined(tokenizer)

    def __call__(self, group: TextGroup, found: list[Documents | Part]) -> Encoded:
        dtype = id_dtype(self._tokenizer)
        begin, end, none = _around(self._tokenizer, dtype)
        sides: list[list[np.ndarray]] = [[none], [none]]
        ends = 0
        pieces = (at for at, window in enumerate(group.windows) if window is not None)
        for one in found:
            if isinstance(one, Documents):
                sides[0].append(one.train)
                sides[1].append(one.held)
                ends += one.ends
                continue
            at = next(pieces)
            window = group.windows[at]
            assert window is not None
            given = self._text.add(window, one)
            ends += sum(int(np.count_nonzero(ids == self._tokenizer.eod)) for ids in given)
            sides[group.held[at]] += [begin if group.first[at] else none, *given, end if group.last[at] else none]
            if group.last[at]:
                self._text = Joined(self._tokenizer)
        train, held = (np.concatenate(side).astype(dtype, copy=False) for side in sides)
        return Encoded(train, held, sum(group.read), ends)


def id_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Of the ids in a cache."""
    return np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)


_tokenizer: Tokenizer  # of a worker


def _begin(tokenizer: Tokenizer) -> None:
    global _tokenizer
    _tokenizer = tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one of its threads


def _of_worker(group: TextGroup) -> list[Documents | Part]:
    return _encode(_tokenizer, group)
