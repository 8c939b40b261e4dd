"""What becomes of the words of conversations that nobody would expect: counted, so that a line can tell."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")


def unrendered(messages: Sequence[dict[str, Any]], tools: Any, text: str, template: str) -> Counter[str]:
    """Key -> how many of the messages have it, while `text`, which the template made of them, does not.

    A text is looked for itself; of other values, such as tool calls, it only counts whether the template names the key.
    """
    lost: Counter[str] = Counter()
    for message in messages:
        for key, value in message.items():
            if key in ("role", "weight") or value is None or value in ("", [], {}):  # what weights say is done
                continue
            if isinstance(value, str):
                there = _written(value, text)
            elif key == "content" and isinstance(value, list):
                there = all(
                    _written(part if isinstance(part, str) else str(part.get("text", "")), text) for part in value
                )
            else:
                there = _named(key, template)
            lost[key] += not there
    if tools and not _named("tools", template):
        lost["tools"] += 1
    return +lost


def in_words(lost: Counter[str]) -> str:
    """A line for the user; "" if nothing is lost."""
    counts = ", ".join(f"{key} of {count:,}" for key, count in sorted(lost.items()))
    return (
        f"the chat template leaves out, or changes, what messages say, and it is not learned: {counts}" if lost else ""
    )


def spelt(messages: Sequence[dict[str, Any]], special: Set[str]) -> Iterator[str]:
    """The special tokens whose text stands in a message, once for each message: tokenizers make those tokens of it."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield from (token for token in special if token in content)


def spelt_in_words(spelt: Counter[str]) -> str:
    """A line for the user; "" if no message spells a special token out."""
    counts = ", ".join(f"{token} in {count:,}" for token, count in sorted(spelt.items()))
    return f"messages spell special tokens out, and are read as these tokens, not as text: {counts}" if spelt else ""


def strange_roles(roles: Counter[str]) -> str:
    """A line for the user; "" if every message has a role that chat templates know."""
    others = ", ".join(f"{role!r} of {count:,}" for role, count in sorted(roles.items()) if role not in ROLES)
    return f"messages of other roles than 'assistant' are not learned; unusual ones: {others}" if others else ""


def unread(keys: Counter[str]) -> str:
    """A line for the user; "" if rows hold nothing but their messages and tools."""
    counts = ", ".join(f"{key} of {count:,}" for key, count in sorted(keys.items()))
    return f"rows hold keys beside their messages and tools, which are not read: {counts}" if keys else ""


def _written(value: str, text: str) -> bool:
    forms = (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
    return any(form.strip() in text for form in forms)


def _named(key: str, template: str) -> bool:
    return re.search(rf"\b{re.escape(key)}\b", template) is not None
