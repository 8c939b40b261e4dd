"""Conversations as token ids, by the chat template of a tokenizer's folder; and which of them the model is to learn."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from plait import PlaitError
from plait.host import reading
from plait_data import forms
from plait_data.answers import Known, Span, learned
from plait_data.images import Images, named_in
from plait_data.marks import CLOSES, OPENS, SIGNS, has_marks, with_fixed_date, with_signs, without_signs
from plait_data.special_tokens import special_tokens
from plait_data.unrendered import spelt, unrendered

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
    template = _object(config).get("chat_template") if config.is_file() else None
    if isinstance(template, list):  # several, by name
        template = next((one.get("template") for one in template if one.get("name") == "default"), None)
    if not isinstance(template, str):
        raise PlaitError(
            f"data.tokenizer={folder} has no chat template (chat_template.jinja, or in tokenizer_config.json): "
            "name a file with one by data.template"
        ).at("data.template", fits="a Jinja template")
    return _sound(template, folder / "tokenizer_config.json")


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
        parsed = json.loads(_text(path, "data.tokenizer"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlaitError(f"{path} cannot be read as JSON: {str(error).splitlines()[0]}").at(
            "data.tokenizer", str(path), fits="a folder whose files are JSON"
        ) from error
    if not isinstance(parsed, dict):
        raise PlaitError(f"{path} must hold a JSON object").at("data.tokenizer", str(path), fits="a JSON object")
    return parsed


def _sound(template: str, path: Path) -> str:
    """`template`, if Jinja can read it; it does not know the tag that marks answers."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(CLOSES.sub("", OPENS.sub("", template)))
    except TemplateSyntaxError as error:
        raise PlaitError(f"the chat template {path} is no Jinja template: line {error.lineno}: {error.message}").at(
            "data.template", str(path), fits="a Jinja template"
        ) from error
    return template


class Template:
    """Renders and encodes conversations. An answer is a message of the role `assistant`, with what the template adds
    after it.

    stops: the names of the tokens that stop an answer, as the tokenizer's folder has them. ends: how many answers ended
    with each special token; None: with none. unrendered: what messages say and the template does not write. spelt:
    messages that spell a special token out. roles: messages of each role.
    """

    def __init__(self, folder: Path, template: str, images: Images | None = None) -> None:
        from tokenizers import processors
        from transformers import PreTrainedTokenizerFast

        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the library raises nothing more specific
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise PlaitError(f"data.tokenizer={folder} cannot be read by transformers: {reason}").at(
                "data.tokenizer", str(folder)
            ) from error
        inner = self._tokenizer.backend_tokenizer
        special = special_tokens(folder / "tokenizer.json", inner)
        # Some leave the space of a token out of its offsets. This one writes no tokens and leaves nothing out.
        inner.post_processor = processors.ByteLevel(trim_offsets=False)
        added = inner.get_added_tokens_decoder()
        self._known = Known(
            added={number: token.content for number, token in added.items()},
            special=frozenset(n for n, token in added.items() if token.special or token.content in special.special)
            | special.stops,
            stops=special.stops,
        )
        self._template, self._images = with_fixed_date(template), images
        self.stops = sorted(str(self.name(number)) for number in special.stops)
        self.ends: Counter[int | None] = Counter()
        self.unrendered: Counter[str] = Counter()
        self.spelt: Counter[str] = Counter()
        self.roles: Counter[str] = Counter()
        self._special = {self.name(number) for number in self._known.special}

    def name(self, number: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(number))

    def encode(self, conversations: Sequence[Conversation]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids (n,) uint32, learned (n,) bool) of each. Raises PlaitError for one that the template refuses."""
        rendered = [self._rendered(one) for one in conversations]
        texts = [text for text, _ in rendered]
        found = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        encoded = []
        for one, (text, spans), numbers, offsets in zip(
            conversations, rendered, found["input_ids"], found["offset_mapping"], strict=True
        ):
            ids = np.array(numbers, np.uint32)
            chosen, ends = learned(text, spans, ids, np.array(offsets, np.int64).reshape(-1, 2), self._known)
            if not chosen.any() and any(text[span.first : span.last].strip() for span in spans):
                raise PlaitError(f"{one.where}: the tokenizer does not say which characters its tokens stand for")
            self.ends.update(ends)
            if self._images is not None:
                ids, chosen = self._images.expanded(named_in(one.messages), ids, chosen, one.where)
            encoded.append((ids, chosen))
        return encoded

    def prompted(self, one: Conversation) -> list[int]:
        """The ids up to where the next answer begins. Raises PlaitError if the template refuses the conversation."""
        forms.check(one.messages, one.where)
        _, text = forms.best(one.messages, lambda form: self._apply(one, form, add_generation_prompt=True))
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def ends_of_answers(self, special: Set[str]) -> list[int]:
        """The last of the tokens `special` in what is learned of a short conversation; empty if it has none."""
        messages = [{"role": "user", "content": "a"}, {"role": ANSWERS, "content": "a"}]
        try:
            [(ids, chosen)] = self.encode([Conversation(messages, None, "an example")])
        except PlaitError:
            return []  # the template has its own idea of a conversation
        ends = [int(one) for one in ids[chosen] if self._tokenizer.convert_ids_to_tokens(int(one)) in special]
        return ends[-1:]

    def _rendered(self, one: Conversation) -> tuple[str, list[Span]]:
        """The text, and where each answer begins and ends in it."""
        forms.check(one.messages, one.where, images=self._images is not None)
        messages, text = forms.best(one.messages, lambda form: self._apply(one, form))
        self.unrendered.update(unrendered(messages, one.tools, text, self._template))
        self.spelt.update(spelt(messages, self._special))
        self.roles.update(message["role"] for message in messages)
        spans = self._marked(one, messages, text) if has_marks(self._template) else self._added(one, messages, text)
        return text, with_weight(spans, one.messages, one.where)

    def _marked(self, one: Conversation, messages: list[dict[str, Any]], text: str) -> list[Span]:
        signs = next((pair for pair in SIGNS if not any(sign in text for sign in pair)), SIGNS[0])
        plain, spans = without_signs(self._apply(one, messages, template=with_signs(self._template, signs)), signs)
        if plain != text:
            raise PlaitError(
                f"{one.where}: the chat template changes what it has marked with {{% generation %}}, so its answers "
                "cannot be located; mark what it writes at last"
            ).at("data.template", fits="marks around what is written")
        return [Span(first, last, exact=True) for first, last in spans]

    def _added(self, one: Conversation, messages: list[dict[str, Any]], text: str) -> list[Span]:
        """What each answer's message adds to a prompt for it."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == ANSWERS:
                until = self._apply(one, messages[: number + 1])
                before = self._apply(one, messages[:number], add_generation_prompt=True) if number else ""
                if not (text.startswith(until) and until.startswith(before)):
                    raise PlaitError(
                        f"{one.where}: the chat template renders message {number + 1} differently in the whole "
                        "conversation than at its end or after a prompt for it, so its answer cannot be located; set "
                        "data.template to a template that marks answers with {% generation %}"
                    ).at("data.template", fits="a template that marks answers")
                first = len(before) if number else self._after_prompt(one, messages, text, until)
                spans.append(Span(first, len(until)))
        return spans

    def _after_prompt(self, one: Conversation, messages: list[dict[str, Any]], text: str, until: str) -> int:
        """Where the answer begins that nothing precedes: after the role's mark, and after what the template adds."""
        prompted = self._apply(one, messages, add_generation_prompt=True)
        prompt = prompted.removeprefix(text) if prompted.startswith(text) else ""
        at = until.find(prompt) if prompt else -1
        return at + len(prompt) if at >= 0 else 0

    def _apply(
        self, one: Conversation, messages: list[dict[str, Any]], template: str | None = None, **options: Any
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=one.tools, chat_template=template or self._template, tokenize=False, **options
            )
        except Exception as error:  # templates raise what they like
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise PlaitError(f"{one.where}: the chat template refuses this conversation: {reason}") from error
        if self._images is not None:
            text = self._images.written(text, named_in(messages), one.where)
        return text.encode("utf-8", "replace").decode()  # JSON can contain half a surrogate pair


def with_weight(spans: list[Span], messages: Sequence[Mapping[str, Any]], where: str) -> list[Span]:
    """The `spans` of the answers whose message has no `weight`, or the weight 1: of others nothing is learned.

    Raises PlaitError for another weight, or if it is not known which span is whose.
    """
    answers = [message for message in messages if message["role"] == ANSWERS]
    weights = [message.get("weight") for message in answers]
    if wrong := [weight for weight in weights if weight not in (None, 0, 1)]:
        raise PlaitError(f"{where}: an answer has the weight {wrong[0]!r}; it must be 0 (not learned) or 1").at(
            "weight", wrong[0], fits=(0, 1)
        )
    if 0 not in weights:
        return spans
    if len(spans) != len(answers):
        raise PlaitError(
            f"{where}: an answer has weight=0, but the chat template marks {len(spans)} places in {len(answers)} "
            "answers, so it is not known which are not learned: leave such answers out, or remove the marks"
        ).at("weight", 0)
    return [span for span, weight in zip(spans, weights, strict=True) if weight != 0]
