"""The forms in which rows hold a conversation: told by a row's keys, and read as messages with a role and a content."""

from collections import Counter
from typing import Any

import attrs

from plait import PlaitError, near_miss

LISTS = ("messages", "conversations")  # keys of a list of messages, the first that a row has
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # sharegpt's names -> those of chat templates
PLAIN, SHAREGPT = "messages (role, content)", "sharegpt (from, value)"
PAIR, ALPACA = "prompt and completion", "alpaca (instruction, input, output)"
FITS = (
    "messages or conversations (a list of messages with role and content, or with from and value), prompt and "
    "completion, or instruction and output"
)

Row = dict[str, Any]


@attrs.frozen
class AsMessages:
    """What a row says. format: in words. keys: of the row, which were read."""

    format: str
    messages: list[Row]
    keys: set[str]


def as_messages(row: Row, key: str | None, where: str) -> AsMessages:
    """The conversation in `row`. key: of its list of messages; None: the row's keys tell.

    Raises PlaitError that begins with `where` for a row that holds none.
    """
    if key is not None and key not in row:
        known = f"{', '.join(row) or 'none'}{near_miss(key, list(row))}"
        raise PlaitError(f"{where}: there is no data.messages_key={key}; available: {known}").at(
            "data.messages_key", key, fits=list(row)
        )
    named = key or next((one for one in LISTS if one in row), None)
    if named is not None:
        return _listed(row, named, where)
    if {"prompt", "completion"} <= row.keys():
        before = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in turns(row, "prompt", "user", where)]
        return AsMessages(PAIR, [*before, *turns(row, "completion", "assistant", where)], {"prompt", "completion"})
    if {"instruction", "output"} <= row.keys():
        asked = "\n\n".join(filter(None, (_text(row, "instruction", where), _text(row, "input", where))))
        answer = {"role": "assistant", "content": _text(row, "output", where)}
        messages = [*_system(row, where), {"role": "user", "content": asked}, answer]
        return AsMessages(ALPACA, messages, {"instruction", "input", "output", "system"})
    raise PlaitError(
        f"{where}: a row with the keys {', '.join(row) or '(none)'} is no conversation that Plait knows: it needs "
        f"{FITS}; data.messages_key names a list of messages under another key"
    ).at("data.messages_key", None, fits=list(row))


def in_words(formats: Counter[str]) -> str:
    """A line for the user. formats: how many rows are read as each."""
    if len(formats) == 1:
        return f"rows are read as {next(iter(formats))}"
    counts = ", ".join(f"{count:,} as {name}" for name, count in sorted(formats.items()))
    return f"rows differ in their format, and are read so: {counts}"


def _listed(row: Row, key: str, where: str) -> AsMessages:
    messages = row[key]
    if not isinstance(messages, list) or not messages:
        raise PlaitError(f"{where}: {key} must hold a list of messages").at("data.messages_key", key)
    first = messages[0]
    if not isinstance(first, dict) or "from" not in first or "role" in first:
        return AsMessages(PLAIN, _checked(messages, "role", "an object with a role and a content", where), {key})
    turns = []
    for turn in _checked(messages, "from", "an object with from and value, as the first is", where, "value"):
        rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
        turns.append({"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"], **rest})
    return AsMessages(SHAREGPT, [*_system(row, where), *turns], {key, "system"})


def _checked(messages: list[Any], role: str, fits: str, where: str, *others: str) -> list[Row]:
    for number, message in enumerate(messages, 1):
        fine = isinstance(message, dict) and isinstance(message.get(role), str) and {*others} <= message.keys()
        if not fine:
            raise PlaitError(f"{where}: message {number} must be {fits}")
    return messages


def turns(row: Row, key: str, role: str, where: str) -> list[Row]:
    """The messages under `key`: a list of them, or a text that `role` says."""
    if isinstance(row[key], list) and row[key]:
        return _checked(row[key], "role", "an object with a role and a content", f"{where}: {key}")
    return [{"role": role, "content": _text(row, key, where, "text, or a list of messages")}]


def _system(row: Row, where: str) -> list[Row]:
    """What a column of its own says to the model before the first message."""
    text = _text(row, "system", where)
    return [{"role": "system", "content": text}] if text else []


def _text(row: Row, key: str, where: str, fits: str = "text") -> str:
    value = row.get(key)
    if not isinstance(value, str | None):
        raise PlaitError(f"{where}: {key} must hold {fits}, not {type(value).__name__}")
    return value or ""
