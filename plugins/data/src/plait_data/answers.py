"""Which tokens of a conversation belong to its answers, by where characters lie, and with which token each one ends."""

from collections.abc import Sequence
from typing import NamedTuple

import attrs
import numpy as np


class Span(NamedTuple):
    """An answer from character to character. exact: a template marked it, so nothing is added or taken away."""

    first: int
    last: int
    exact: bool = False


@attrs.frozen
class Known:
    """Of a tokenizer: the text of added tokens by id, the ids of special ones, and those that stop an answer."""

    added: dict[int, str]
    special: frozenset[int]
    stops: frozenset[int]


def learned(
    text: str, spans: Sequence[Span], ids: np.ndarray, offsets: np.ndarray, known: Known
) -> tuple[np.ndarray, list[int | None]]:
    """Whether each token, of offsets (n, 2) in `text`, has a character in a span; and each span's last special token,
    if only space follows it.

    The space between that token and the next turn is not learned, and without such a token a stop right after the
    answer is, unless the span is exact.
    """
    begin, end = extents(text, ids, offsets, known.added)
    chosen = np.zeros(len(ids), bool)
    ends: list[int | None] = []
    for span in spans:
        # A token without characters, such as the sign of a space that the text lacks, belongs to what follows it.
        own = np.flatnonzero((begin < span.last) & ((end > span.first) | ((begin == end) & (begin >= span.first))))
        if span.first == span.last or not len(own):
            continue
        first, last = int(own[0]), int(own[-1])
        final = last
        while final > first and int(ids[final]) not in known.special and not text[begin[final] : end[final]].strip():
            final -= 1
        closed = int(ids[final]) in known.special
        if not span.exact and closed:
            last = final
        elif not span.exact:
            after = last + 1
            while after < len(ids) and int(ids[after]) not in known.stops and not text[end[last] : end[after]].strip():
                after += 1
            if after < len(ids) and int(ids[after]) in known.stops:
                last = final = after
                closed = True
        chosen[first : last + 1] = True
        ends.append(int(ids[final]) if closed else None)
    return chosen, ends


def extents(text: str, ids: np.ndarray, offsets: np.ndarray, added: dict[int, str]) -> tuple[np.ndarray, np.ndarray]:
    """The first character of each token, and the one after its last.

    Space around an added token that its offsets include is not its own. A token without characters lies after the
    tokens before it, although a tokenizer may say that it lies at 0.
    """
    begin, end = offsets[:, 0].copy(), offsets[:, 1].copy()
    for place in np.flatnonzero(np.isin(ids, [*added])).tolist():
        content = added[int(ids[place])]
        at = text.find(content, begin[place], end[place])
        if at >= 0:
            begin[place], end[place] = at, at + len(content)
    reached = np.maximum.accumulate(np.concatenate([[0], end]))[:-1]
    empty = begin >= end
    begin[empty] = end[empty] = np.maximum(begin, reached)[empty]
    return begin, end
