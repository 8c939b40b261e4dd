"""Encodes documents on all cores, and gives their ids in the documents' order."""

import math
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import attrs
import numpy as np

from plait.contract.errors import PlaitError
from plait.data.documents import File, pieces
from plait.data.left_out import LeftOut
from plait.data.order import digest64
from plait.data.tokenizer import Tokenizer
from plait.system.processes import can_fork, cores, processes

GROUP = 1 << 19  # bytes of text that a core gets at once
AHEAD = 2  # groups per core that are read, and not yet taken


@attrs.frozen
class Group:
    """Documents, or pieces of long ones, in order.

    held: whether each one's document is for validation. first, last: whether its document begins and ends with it.
    read: bytes that were read for them.
    """

    texts: list[bytes]
    held: list[bool]
    first: list[bool]
    last: list[bool]
    read: int


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
    if tokenizer.cheap or not can_fork():
        size = GROUP if tokenizer.cheap else GROUP * cores()  # for all threads at once
        for group in _groups(files, text_key, fraction, size, lost):
            yield _encode(tokenizer, group)
        return
    workers = min(cores(), math.ceil(sum(file.size for file in files) / GROUP))
    waiting: deque[Future[Encoded]] = deque()
    try:
        with processes(workers, _begin, tokenizer) as pool:
            for group in _groups(files, text_key, fraction, GROUP, lost):
                waiting.append(pool.submit(_of_worker, group))
                if len(waiting) == AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise PlaitError(
            "a process that turned text into tokens was killed, perhaps because memory ran out; fewer cores "
            "(taskset) need less"
        ) from error


def _groups(files: list[File], text_key: str, fraction: float, size: int, lost: LeftOut | None) -> Iterator[Group]:
    texts: list[bytes] = []
    held: list[bool] = []
    first: list[bool] = []
    last: list[bool] = []
    filled = read = 0
    out = False
    for file in files:
        for piece in pieces(file, text_key, lost):
            out = held_out(piece.text, fraction) if piece.first else out
            texts.append(piece.text)
            held.append(out)
            first.append(piece.first)
            last.append(piece.last)
            filled, read = filled + len(piece.text), read + piece.read
            if filled >= size:
                yield Group(texts, held, first, last, read)
                texts, held, first, last, filled, read = [], [], [], [], 0, 0
    if texts:
        yield Group(texts, held, first, last, read)


def _encode(tokenizer: Tokenizer, group: Group) -> Encoded:
    dtype = id_dtype(tokenizer)
    begin, end, none = np.array(tokenizer.begins, dtype), np.array([tokenizer.eod], dtype), np.empty(0, dtype)
    sides: list[list[np.ndarray]] = [[none], [none]]
    for ids, held, first, last in zip(tokenizer.encode(group.texts), group.held, group.first, group.last, strict=True):
        sides[held] += [begin if first else none, ids, end if last else none]
    train, held_ids = (np.concatenate(side).astype(dtype, copy=False) for side in sides)
    ends = sum(int(np.count_nonzero(side == tokenizer.eod)) for side in (train, held_ids))
    return Encoded(train, held_ids, group.read, ends - sum(group.last))


def id_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Of the ids in a cache."""
    return np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)


_tokenizer: Tokenizer  # of a worker


def _begin(tokenizer: Tokenizer) -> None:
    global _tokenizer
    _tokenizer = tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one of its threads


def _of_worker(group: Group) -> Encoded:
    return _encode(_tokenizer, group)
