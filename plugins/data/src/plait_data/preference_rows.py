"""The forms in which rows hold preferences: a pair of answers to one prompt, or one answer with a label."""

from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from plait import PlaitError
from plait_data.row_formats import Row, turns
from plait_data.template import ANSWERS, Conversation

BEGINS = ("system", "developer", "user")  # roles of a conversation's first message
PAIRS, LABELS = "pairs of answers", "answers with labels"
FITS = {
    PAIRS: "chosen and rejected, each a text beside prompt, or a list of messages",
    LABELS: "prompt and completion, each a text or a list of messages, and label (true or false)",
}


@attrs.frozen
class Preference:
    """A row. rows: two conversations. marks: what each is to the loss. size: bytes that were read for them."""

    rows: tuple[Conversation, Conversation]
    marks: tuple[int, int]
    size: int


def gives(row: Row, where: str) -> str:
    """PAIRS or LABELS. Raises PlaitError that begins with `where` for a row that is neither."""
    if {"chosen", "rejected"} <= row.keys():
        return PAIRS
    if {"prompt", "completion", "label"} <= row.keys():
        return LABELS
    known = ", ".join(row) or "(none)"
    raise PlaitError(
        f"{where}: a row with the keys {known} holds no preference: it needs {FITS[PAIRS]}; or {FITS[LABELS]}"
    ).at("data.path", fits=tuple(FITS.values()))


def preferences(rows: Iterable[tuple[str, Row, int]], kind: str) -> Iterator[Preference]:
    """The preferences of `rows`, all of one kind. Raises PlaitError, naming file and line, for a row that is none."""
    return _labels(rows) if kind == LABELS else (_pair(*one) for one in _checked(rows, kind))


def _checked(rows: Iterable[tuple[str, Row, int]], kind: str) -> Iterator[tuple[str, Row, int]]:
    for where, row, size in rows:
        if (own := gives(row, where)) != kind:
            raise PlaitError(f"{where}: the row gives {own}, but the first row gives {kind}: take rows of one kind")
        yield where, row, size


def _pair(where: str, row: Row, size: int) -> Preference:
    prompt = turns(row, "prompt", "user", where) if row.get("prompt") else []
    chosen, rejected = (_after(prompt, turns(row, key, ANSWERS, where)) for key in ("chosen", "rejected"))
    both = zip(chosen, rejected, strict=False)
    alike = next((at for at, (one, other) in enumerate(both) if one != other), min(len(chosen), len(rejected)))
    if not prompt and not alike:
        raise PlaitError(f"{where}: chosen and rejected have no prompt in common; give it as prompt")
    tools = row.get("tools") or None
    one, other = (Conversation(_prompt(each, alike), tools, where) for each in (chosen, rejected))
    return Preference((one, other), (1, 0), size)


def _labels(rows: Iterable[tuple[str, Row, int]]) -> Iterator[Preference]:
    """Each answer, and its prompt with the answer of the next row; of the last row, of the first."""
    first = before = None
    for where, row, size in _checked(rows, LABELS):
        if not isinstance(row["label"], bool):
            raise PlaitError(f"{where}: label must be true or false, not {row['label']!r}")
        now = turns(row, "prompt", "user", where), turns(row, "completion", ANSWERS, where), row, where, size
        if before is None:
            first = now
        else:
            yield _with_other(before, now[1])
        before = now
    if before is not None and first is not None:
        if before is first:
            raise PlaitError(
                f"{before[3]}: an answer with a label needs a second row, whose answer it is compared with"
            )
        yield _with_other(before, first[1])


def _with_other(own: tuple[Any, ...], other: list[Row]) -> Preference:
    prompt, answer, row, where, size = own
    both = (_prompt([*prompt, *each], len(prompt)) for each in (answer, other))
    one, mate = (Conversation(messages, row.get("tools") or None, where) for messages in both)
    return Preference((one, mate), (int(row["label"]), -1), size)


def _after(prompt: list[Row], answer: list[Row]) -> list[Row]:
    """The whole conversation; `answer` may be all of it, and then begins as conversations do."""
    return answer if answer[0]["role"] in BEGINS else [*prompt, *answer]


def _prompt(messages: list[Row], count: int) -> list[Row]:
    """`messages`, of which the first `count` are not learned."""
    return [
        {**message, "weight": 0} if at < count and message["role"] == ANSWERS else message
        for at, message in enumerate(messages)
    ]
