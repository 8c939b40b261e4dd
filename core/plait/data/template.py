"""Conversations as token ids, by the chat template of a tokenizer's folder; and which of them the model is to learn."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from plait.contract.errors import PlaitError
from plait.system.disk import reading

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # transformers' tag around what a template calls an answer
ANSWERS = "assistant"


@attrs.frozen
class Conversation:
    """messages: each {"role", "content", ...}. tools: JSON schemas, or None. where: its file and line, in words."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    where: str


def template_of(folder: Path, given: str | None) -> str:
    """The text of the template file `given`, or that of the folder. Raises PlaitError if there is none."""
    if given is not None:
        path = Path(given).expanduser()
        if not path.is_file():
            raise PlaitError(f"data.template={given} is not a file").at("data.template", given, fits="a Jinja template")
        return _sound(_text(path, "data.template"), path)
    if (own := folder / "chat_template.jinja").is_file():
        return _sound(_text(own, "data.tokenizer"), own)
    config = folder / "tokenizer_config.json"
    found = _object(config).get("chat_template") if config.is_file() else None
    if isinstance(found, list):  # several, by name
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    if not isinstance(found, str):
        raise PlaitError(
            f"data.tokenizer={folder} has no chat template (chat_template.jinja, or in tokenizer_config.json): "
            "name a file with one by data.template"
        ).at("data.template", fits="a Jinja template")
    return _sound(found, folder / "tokenizer_config.json")


def _text(path: Path, key: str) -> str:
    """What `path` holds, without a byte order mark. Raises PlaitError if it is not UTF-8 or cannot be read."""
    try:
        with reading(path, key):
            return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlaitError(f"{path} is not text in UTF-8: byte {error.start} is wrong; save it as UTF-8").at(
            key, str(path), fits="a file in UTF-8"
        ) from error


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path, "data.tokenizer"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlaitError(f"{path} cannot be read as JSON: {str(error).splitlines()[0]}").at(
            "data.tokenizer", str(path), fits="a folder whose files are JSON"
        ) from error
    if not isinstance(found, dict):
        raise PlaitError(f"{path} must hold a JSON object").at("data.tokenizer", str(path), fits="a JSON object")
    return found


def _sound(template: str, path: Path) -> str:
    """`template`, if Jinja can read it; it does not know the tag that marks answers."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
        )
    except TemplateSyntaxError as error:
        raise PlaitError(f"the chat template {path} is no Jinja template: line {error.lineno}: {error.message}").at(
            "data.template", str(path), fits="a Jinja template"
        ) from error
    return template


class Template:
    """Renders and encodes conversations. An answer is a message of the role `assistant`, with what the template adds
    after it."""

    def __init__(self, folder: Path, template: str) -> None:
        from transformers import PreTrainedTokenizerFast

        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the library raises nothing more specific
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise PlaitError(f"data.tokenizer={folder} cannot be read by transformers: {reason}").at(
                "data.tokenizer", str(folder)
            ) from error
        self._template = template

    def encode(self, conversations: Sequence[Conversation]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids (n,) uint32, learned (n,) bool) of each. Raises PlaitError for one that the template refuses."""
        if MARK.search(self._template):
            return [self._marked(one) for one in conversations]
        rendered = [self._rendered(one) for one in conversations]
        texts = [text for text, _ in rendered]
        found = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        return [
            (np.array(ids, np.uint32), _inside(np.array(offsets).reshape(-1, 2), answers))
            for ids, offsets, (_, answers) in zip(found["input_ids"], found["offset_mapping"], rendered, strict=True)
        ]

    def _marked(self, one: Conversation) -> tuple[np.ndarray, np.ndarray]:
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = self._apply(one, one.messages, **options)
        return np.array(found["input_ids"], np.uint32), np.array(found["assistant_masks"], bool)

    def _rendered(self, one: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The text, and where each answer begins and ends in it: what its message adds to a prompt for it."""
        text = self._apply(one, one.messages, tokenize=False)
        answers = []
        for number, message in enumerate(one.messages):
            if message["role"] == ANSWERS:
                before = self._apply(one, one.messages[:number], tokenize=False, add_generation_prompt=True)
                until = self._apply(one, one.messages[: number + 1], tokenize=False)
                if not (text.startswith(until) and until.startswith(before)):
                    raise PlaitError(
                        f"{one.where}: the chat template renders message {number + 1} differently in the whole "
                        "conversation than at its end or after a prompt for it, so its answer cannot be located; set "
                        "data.template to a template that marks answers with {% generation %}"
                    ).at("data.template", fits="a template that marks answers")
                answers.append((len(before), len(until)))
        return text, answers

    def _apply(self, one: Conversation, messages: list[dict[str, Any]], **options: Any) -> Any:
        if not messages:
            return ""
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=one.tools, chat_template=self._template, **options
            )
        except Exception as error:  # templates raise what they like
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise PlaitError(f"{one.where}: the chat template refuses this conversation: {reason}") from error


def _inside(offsets: np.ndarray, answers: list[tuple[int, int]]) -> np.ndarray:
    """Whether each token, from offset to offset (n, 2) of the text, lies within an answer."""
    begin, end = offsets[:, 0], offsets[:, 1]
    learned = np.zeros(len(offsets), bool)
    for first, last in answers:
        learned |= (begin >= first) & (end <= last) & (end > begin)
    return learned
