"""Forms of messages that mean the same, and which of them a chat template renders as text rather than as data.

A template may print the arguments of a tool call as they are, turn them into JSON, or go through them; its author had
one form in mind. A form that does not fit often renders without an error: JSON in JSON, or Python's `None`.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from plait import PlaitError
from plait_data.images import is_image, name_of, named_in

Messages = list[dict[str, Any]]


def check(messages: Messages, where: str, images: bool = False) -> None:
    """Raise PlaitError, naming the message, for parts that are no text, and tool calls that cannot be read."""
    for number, message in enumerate(messages, 1):
        at = f"{where}: message {number}"
        content = message.get("content")
        if isinstance(content, list):
            for place, part in enumerate(content, 1):
                if is_image(part):
                    if images:
                        continue
                    raise PlaitError(
                        f"{at}: part {place} of its content is the image {name_of(part)}, and there is no data.images: "
                        "the model takes text alone, unless model.images names a folder"
                    ).at("data.images", None, fits="a folder made for model.images")
                if not isinstance(part, str) and not (isinstance(part, dict) and isinstance(part.get("text"), str)):
                    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                    raise PlaitError(f"{at}: part {place} of its content is no text, but of type {kind}")
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise PlaitError(f"{at}: tool_calls must be a list")
        for place, call in enumerate(calls or [], 1):
            function = _function(call)
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise PlaitError(f"{at}: tool call {place} must be an object with a name and arguments")
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments)
                except (ValueError, RecursionError) as error:
                    raise PlaitError(
                        f"{at}: the arguments of tool call {place} ({function['name']}) are not JSON: {error}"
                    ) from error
            if not isinstance(arguments, dict | None):
                raise PlaitError(
                    f"{at}: the arguments of tool call {place} ({function['name']}) must be a JSON object, not of type "
                    f"{type(arguments).__name__}"
                )


def best(messages: Messages, render: Callable[[Messages], str]) -> tuple[Messages, str]:
    """The first form in which `render` shows everything as text, or else the one with the fewest faults; and its text.

    Raises the error of the messages as they are, if `render` refuses all forms.
    """
    refusal: PlaitError | None = None
    found: tuple[int, Messages, str] | None = None
    for form in forms(messages):
        try:
            text = render(form)
        except PlaitError as error:
            refusal = refusal or error
            continue
        count = faults(form, text)
        if found is None or count < found[0]:
            found = count, form, text
        if count == 0:
            break
    if found is None:
        assert refusal is not None
        raise refusal
    return found[1], found[2]


def forms(messages: Messages) -> Iterator[Messages]:
    """The messages as they are, then in every other form."""
    called = any(message.get("tool_calls") for message in messages)
    parts = any(isinstance(message.get("content"), list | dict) for message in messages)
    changes: list[tuple[Callable[[dict[str, Any]], dict[str, Any]], ...]] = [
        (_same, _other_arguments) if called else (_same,),
        (_same, _other_wrapping) if called else (_same,),
        (_same, _joined) if parts and not named_in(messages) else (_same,),  # no text stands for an image
        (_same, _filled) if any("content" in m and m["content"] is None for m in messages) else (_same,),
    ]
    for arguments, wrapping, content, missing in itertools.product(*changes):
        yield [missing(content(wrapping(arguments(message)))) for message in messages]


def faults(messages: Messages, text: str) -> int:
    """In how many places `text` shows data instead of text, or lacks what a tool call says."""
    count = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            count += repr(content) in text or any(one in text for one in _json(content))
            count += sum(part.strip() not in text for part in _texts(content))
        elif isinstance(content, dict):
            count += repr(content) in text or not all(str(value) in text for value in content.values())
        for call in message.get("tool_calls") or []:
            function = _function(call)
            arguments = function.get("arguments")
            count += function["name"] not in text
            if isinstance(arguments, str):
                count += any(one in text for one in _json(arguments)) or arguments.strip() not in text
            elif arguments is not None:
                count += repr(arguments) in text and repr(arguments) not in _json(arguments)
    if any("content" in message and message["content"] is None for message in messages):
        count += max(0, text.count("None") - json.dumps(messages).count("None"))
    return count


def _json(value: Any) -> tuple[str, str]:
    return json.dumps(value), json.dumps(value, ensure_ascii=False)


def _function(call: Any) -> Any:
    return call.get("function", call) if isinstance(call, dict) else None


def _texts(content: list[Any]) -> list[str]:
    """The texts in a list of parts."""
    return [part if isinstance(part, str) else part["text"] for part in content if not is_image(part)]


def _same(message: dict[str, Any]) -> dict[str, Any]:
    return message


def _with_calls(message: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [change(call) for call in calls]} if calls else message


def _other_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """JSON strings as objects, objects as JSON strings."""

    def change(call: dict[str, Any]) -> dict[str, Any]:
        function = dict(_function(call))
        arguments = function.get("arguments")
        if arguments is not None:
            read = isinstance(arguments, str)
            function["arguments"] = json.loads(arguments) if read else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": function} if "function" in call else function

    return _with_calls(message, change)


def _other_wrapping(message: dict[str, Any]) -> dict[str, Any]:
    """With the object `function` around name and arguments, as OpenAI has it, or without."""

    def change(call: dict[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return {**{key: value for key, value in call.items() if key != "function"}, **call["function"]}
        own = {key: call[key] for key in ("name", "arguments") if key in call}
        return {"type": "function", **{key: value for key, value in call.items() if key not in own}, "function": own}

    return _with_calls(message, change)


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """A list of parts as one text, an object as JSON."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": "".join(_texts(content))}
    return {**message, "content": json.dumps(content, ensure_ascii=False)} if isinstance(content, dict) else message


def _filled(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": ""} if "content" in message and message["content"] is None else message
