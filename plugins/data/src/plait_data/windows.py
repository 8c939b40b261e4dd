"""Long texts in pieces, with the same ids as in one go.

A tokenizer may look beyond the border of a piece: it merges across it, or begins every text with a space. So each piece
is encoded with the ends of its neighbours, in a window. Two windows overlap; where they came to the same tokens around
the middle of their overlap, what was cut off at its ends made no difference, and they are joined there. Where they did
not, as in a word longer than the overlap, they are encoded again as one.
"""

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from plait_data.documents import TextPiece
from plait_data.tokenizer import Tokenizer

CONTEXT = 1 << 11  # characters of a neighbour


@attrs.frozen
class Window:
    """A piece of a long text between the ends of its neighbours.

    before, after: characters that it shares with the window before, and with that behind; 0 if there is none.
    """

    text: str
    before: int
    after: int

    def with_next(self, other: "Window") -> "Window":
        return Window(self.text + other.text[other.before :], self.before, other.after)


@attrs.frozen
class Part:
    """The ids of a window (n,). head, tail: [id, first character, character after the last] of its first and last
    tokens (m, 3), as far as they begin in the text shared with a neighbour, whose characters are counted from 0."""

    ids: np.ndarray
    head: np.ndarray
    tail: np.ndarray


def windows(pieces: Iterator[TextPiece]) -> Iterator[tuple[TextPiece, Window | None]]:
    """Each piece with its window; with None if it is a whole document."""
    held: TextPiece | None = None
    before = now = ""
    for piece in pieces:
        text = "" if piece.first and piece.last else piece.text.decode("utf-8", "replace")
        if held is not None:
            yield held, _window(before, now, text)
            before, held = now, None
        if not text:
            yield piece, None
            continue
        held, now, before = piece, text, "" if piece.first else before
        if piece.last:
            yield piece, _window(before, now, "")
            held = None


def _window(before: str, now: str, after: str) -> Window:
    left, right = before[-CONTEXT:], after[:CONTEXT]
    own = min(len(now), CONTEXT)
    return Window(left + now + right, len(left) and len(left) + own, len(right) and len(right) + own)


def encode(tokenizer: Tokenizer, given: Sequence[Window]) -> list[Part]:
    """The part of each window."""
    if not given:
        return []
    ids = tokenizer.encode([window.text.encode() for window in given])
    # The places of all tokens would take half as long again: only the ends are encoded with them.
    heads = tokenizer.places([window.text[: 2 * window.before] for window in given])
    tails = tokenizer.places([window.text[-2 * window.after :] if window.after else "" for window in given])
    return [_part(*one) for one in zip(given, ids, heads, tails, strict=True)]


def encode_exactly(tokenizer: Tokenizer, window: Window) -> Part:
    """Its part, with the places of all tokens."""
    (found,) = tokenizer.places([window.text])
    return _part(window, found[:, 0].astype(np.uint32), found, found, len(window.text))


def _part(window: Window, ids: np.ndarray, first: np.ndarray, last: np.ndarray, size: int | None = None) -> Part:
    """first, last: the tokens of a stretch at the start, and of one of `size` characters at the end. They count as far
    as they are those of the whole window."""
    begin = (size or min(2 * window.after, len(window.text))) - window.after
    head = first[first[:, 1] < window.before]
    tail = last[last[:, 1] >= begin] - np.array([0, begin, begin]) if window.after else last[:0]
    return Part(
        ids,
        head if np.array_equal(ids[: len(head)], head[:, 0]) else head[:0],
        tail if np.array_equal(ids[max(len(ids) - len(tail), 0) :], tail[:, 0]) else tail[:0],
    )


def joint(left: Part, right: Part, shared: int) -> tuple[int, int] | None:
    """(how many ids of `left` to take, how many of `right` to leave out) for the text of both, which share `shared`
    characters; None if they do not agree."""
    inner = slice(shared // 4, shared - shared // 4)
    ours, theirs = (side[(side[:, 1] >= inner.start) & (side[:, 1] < inner.stop)] for side in (left.tail, right.head))
    if not len(ours) or not np.array_equal(ours, theirs) or ours[-1, 1] < shared // 2:
        return None
    behind = [int(np.argmax(side[:, 1] >= shared // 2)) for side in (left.tail, right.head)]
    return len(left.ids) - len(left.tail) + behind[0], behind[1]


class Joined:
    """The ids of one long text, as its windows come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._left: tuple[Window, Part] | None = None
        self._skip = 0  # ids at the start of the left part that were given already
        self._from = 0  # the character of it at which what was not given begins
        self._waiting: list[Window] = []  # that did not agree with it

    def add(self, window: Window, part: Part) -> list[np.ndarray]:
        """The ids that are certain now; with the last window (after=0) all that are left."""
        given = []
        if self._left is None:
            self._left = window, part
        elif self._waiting or (at := joint(self._left[1], part, window.before)) is None:
            self._wait(window)
        else:
            given.append(self._left[1].ids[self._skip : at[0]])
            self._left, self._skip = (window, part), at[1]
            self._from = int(part.head[at[1], 1])
        if not window.after:
            given.append(self._left[1].ids[self._skip :])
        return given

    def _wait(self, window: Window) -> None:
        """Encode the left window and those that wait as one; twice as much each time, so that time stays linear."""
        assert self._left is not None
        self._waiting.append(window)
        left = self._left[0]
        if window.after and sum(len(one.text) for one in self._waiting) < len(left.text):
            return
        for one in self._waiting:
            left = left.with_next(one)
        self._waiting = []
        self._left = left, encode_exactly(self._tokenizer, left)
        head = self._left[1].head
        self._skip = int((head[:, 1] < self._from).sum())
