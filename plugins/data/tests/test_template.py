"""What of a conversation is learned: templates with and without marks, tokenizers of every kind, forms of messages."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from plait import PlaitError
from plait.testing import raises_about
from plait_data.answers import Known, Span, learned
from plait_data.conversations import of_ends
from plait_data.forms import faults
from plait_data.marks import SIGNS
from plait_data.template import Conversation, Template

SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
HEAD = "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
PLAIN = HEAD + "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
NEXT_ROLE = HEAD + "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
MARKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ '<|user|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
)
CALL = (
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} %s]{% endfor %}"
)


def made(path, template, kind="bytes", trim=False, lstrip=False, stops=("<|end|>",)):
    """A template with a small tokenizer: pieces of bytes, words with the sign of a space, or lower-case words."""
    if kind == "bytes":
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        inner.train_from_iterator(
            ["yes    no"] * 9, trainers.BpeTrainer(initial_alphabet=alphabet, vocab_size=300, special_tokens=[])
        )
        inner.post_processor = processors.ByteLevel(trim_offsets=trim)
    elif kind == "prepended":
        inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
        inner.train_from_iterator(
            ["abc def secret question yes no A B"] * 9, trainers.BpeTrainer(vocab_size=40, special_tokens=["<unk>"])
        )
    inner.add_special_tokens([AddedToken(one, normalized=False, lstrip=lstrip) for one in SPECIAL])
    path.mkdir(exist_ok=True)
    inner.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [inner.token_to_id(one) for one in stops]})
    )
    return Template(path, template)


def texts(template, messages, tools=None):
    """(all that is rendered, what is learned)."""
    ((ids, chosen),) = template.encode([Conversation(messages, tools, "a.jsonl, line 1")])
    return template._tokenizer.decode(ids), template._tokenizer.decode(ids[chosen])


def says(role, content, **more):
    return {"role": role, "content": content, **more}


SECRET = says("user", "secret question")


ANSWERS = [["A", "B"], ["abc", ""], ["", "abc"], ["yes    ", "B"], [" yes", "no "]]


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("answers", [*ANSWERS, ["\r\nyes\r\n", "no"], ["日本 😀", "é👩‍👩‍👧"]])
def test_marked_text_is_learned_and_nothing_else(tmp_path, trim, answers):
    template = made(tmp_path, MARKS, trim=trim)
    _, found = texts(template, [says("assistant", answers[0]), SECRET, says("assistant", answers[1])])
    assert found == "".join(answers)


@pytest.mark.parametrize("options", [{"lstrip": True}, {"kind": "prepended"}], ids=["lstrip", "prepended"])
@pytest.mark.parametrize("answers", ANSWERS)
def test_it_is_where_tokens_swallow_or_add_space(tmp_path, options, answers):
    """The mark of a role that takes in the space before it, and a sign that is written before each text."""
    template = made(tmp_path, MARKS, **options)
    _, found = texts(template, [says("assistant", answers[0]), SECRET, says("assistant", answers[1])])
    assert found.replace(" ", "") == "".join(answers).replace(" ", "")


@pytest.mark.parametrize(
    "template",
    [
        "{% macro turn(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{{ turn(m) }}{% else %}{{ m.content }}"
        "{% endif %}<|end|>{% endfor %}",
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% set x %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% endset %}{{ x }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}",
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% for c in m.content %}{% generation %}"
        "{{ c }}{% endgeneration %}{% endfor %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}",
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{%- generation -%}\n  {{ m.content }}\n"
        "{%- endgeneration -%}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}",
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content[:1] }}"
        "{% endgeneration %}{% generation %}{% generation %}{{ m.content[1:] }}{% endgeneration %}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}",
    ],
    ids=["macro", "captured", "loop", "space", "several"],
)
def test_marks_anywhere_in_a_template(tmp_path, template):
    whole, found = texts(made(tmp_path, template), [SECRET, says("assistant", "yes"), SECRET, says("assistant", "no")])
    assert found == "yesno"
    assert whole == (
        "<|user|>secret question<|end|><|assistant|>yes<|end|><|user|>secret question<|end|><|assistant|>no<|end|>"
    )


def test_marks_around_what_is_changed_later(tmp_path):
    template = made(
        tmp_path,
        "{% for m in messages %}{% set x %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}"
        "{{ x | trim }}{% endfor %}",
    )
    with raises_about("data.template"):
        texts(template, [says("assistant", " yes ")])


@pytest.mark.parametrize("trim", [False, True])
def test_an_answer_ends_with_its_turn(tmp_path, trim):
    """The newline between two turns is not learned, space at the end of an answer is."""
    template = made(tmp_path, PLAIN, trim=trim)
    _, found = texts(template, [SECRET, says("assistant", "yes    "), SECRET, says("assistant", "no\n")])
    assert found == "yes    <|end|>no\n<|end|>"
    assert template.name(next(iter(template.ends))) == "<|end|>"
    assert [*of_ends(template.ends, template.stops, template.name)] == []


def test_the_next_role_ends_an_answer(tmp_path):
    talk = [SECRET, says("assistant", "yes"), SECRET, says("assistant", "no")]
    template = made(tmp_path, NEXT_ROLE, stops=("<|user|>", "<|endoftext|>"))
    assert texts(template, talk)[1] == "yes<|user|>no"
    (line,) = of_ends(template.ends, template.stops, template.name)
    assert line.startswith("1 of 2 answers end without a special token: the template ends no turn there")
    unknown = made(tmp_path, NEXT_ROLE, stops=())
    assert texts(unknown, talk)[1] == "yesno"
    (line,) = of_ends(unknown.ends, unknown.stops, unknown.name)
    assert line.startswith("2 of 2 answers end without a special token")


def test_an_end_that_the_folder_does_not_know(tmp_path):
    template = made(tmp_path, PLAIN, stops=())
    texts(template, [SECRET, says("assistant", "yes")])
    (line,) = of_ends(template.ends, template.stops, template.name)
    assert line.startswith("answers end with <|end|>, which the tokenizer's folder does not name")


def test_an_answer_at_the_start_begins_after_its_role_and_the_default_system_turn(tmp_path):
    template = made(tmp_path, "<|tool|>be kind<|end|>" + PLAIN)
    assert texts(template, [says("assistant", "yes")])[1] == "yes<|end|>"


def test_a_token_without_characters_belongs_to_what_follows():
    known = Known({9: "<|end|>"}, frozenset({9}), frozenset())
    ids = np.array([1, 2, 9, 1, 2], np.uint32)
    offsets = np.array([[0, 0], [0, 2], [2, 9], [0, 0], [9, 11]])
    assert learned("ab<|end|>cd", [Span(0, 2, True)], ids, offsets, known)[0].tolist() == [True, True, *[False] * 3]
    assert learned("ab<|end|>cd", [Span(9, 11, True)], ids, offsets, known)[0].tolist() == [*[False] * 3, True, True]


def test_a_token_across_the_border_is_learned():
    known = Known({}, frozenset(), frozenset())
    offsets = np.array([[0, 2], [2, 5], [5, 6]])
    chosen, ends = learned("A: hi\n", [Span(3, 5, True)], np.arange(3, dtype=np.uint32), offsets, known)
    assert chosen.tolist() == [False, True, False]
    assert ends == [None]


ARGUMENTS = {"city": "Zürich", "days": 2}
PRINTS = {
    "json": "{{ c.function.arguments | tojson }}",
    "text": "{{ c.function.arguments }}",
    "joined": "{{ '<' + c.function.arguments + '>' }}",
    "items": "{% for key, value in c.function.arguments | items %}{{ key }}={{ value }};{% endfor %}",
    "methods": "{% for key, value in c.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}",
    "keys": "{% for key in c.function.arguments %}{{ key }}={{ c.function.arguments[key] }};{% endfor %}",
}


@pytest.mark.parametrize("how", PRINTS)
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("as_text", [True, False])
def test_arguments_of_tool_calls_are_rendered_as_the_template_means_them(tmp_path, how, wrapped, as_text):
    template = made(tmp_path, HEAD + CALL.replace("%s", PRINTS[how]) + "<|end|>{% endfor %}")
    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    call = {"name": "weather", "arguments": text if as_text else ARGUMENTS}
    calls = [{"id": "1", "type": "function", "function": call} if wrapped else call]
    _, found = texts(template, [SECRET, {"role": "assistant", "content": None, "tool_calls": calls}])
    shown = {"json": text, "text": text, "joined": f"<{text}>"}.get(how, "city=Zürich;days=2;")
    assert found.endswith(f"[weather {shown}]<|end|>")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "{oops"}}]},
            "message 1: the arguments of tool call 1",
        ),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "must be a JSON object, not of type list"),
        ({"tool_calls": [{"function": {"arguments": "{}"}}]}, "tool call 1 must be an object with a name"),
        ({"tool_calls": "f"}, "message 1: tool_calls must be a list"),
        ({"content": [{"type": "image_url", "image_url": "x"}]}, "part 1 of its content is no text, but of type image"),
    ],
)
def test_messages_that_cannot_be_read(tmp_path, message, said):
    with pytest.raises(PlaitError, match=f"^a.jsonl, line 1: .*{said}"):
        texts(made(tmp_path, PLAIN), [{"role": "assistant", "content": "", **message}])


@pytest.mark.parametrize(
    "print_content",
    [
        "{{ m.content }}",
        "{{ '' + m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}{{ p.text }}{% endfor %}"
        "{% endif %}",
    ],
)
def test_content_in_parts_and_without_a_value(tmp_path, print_content):
    template = made(tmp_path, HEAD + print_content + "<|end|>{% endfor %}")
    parts = [{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}]
    asked = [says("tool", parts), says("assistant", parts), says("user", None), says("assistant", "None")]
    whole, _ = texts(template, asked)
    assert whole == "<|tool|>sunny<|end|><|assistant|>sunny<|end|><|user|><|end|><|assistant|>None<|end|>"
    assert texts(template, [says("tool", {"degrees": 20})])[0] == '<|tool|>{"degrees": 20}<|end|>'


def test_a_missing_content_shown_as_none_is_a_fault_but_what_somebody_said_is_not():
    asked = [says("user", None), says("assistant", "None")]
    assert [faults(asked, text) for text in ("<user><assistant>None", "<user>None<assistant>None")] == [0, 1]


def test_signs_that_a_conversation_has_are_not_those_of_an_answer(tmp_path):
    """The signs between which an answer is rendered are a pair of which the text has neither."""
    template = made(tmp_path, MARKS)
    asked = [says("user", SIGNS[0][0]), says("assistant", "yes"), says("user", SIGNS[1][1]), says("assistant", "no")]
    assert texts(template, asked)[1] == "yesno"


def test_half_a_surrogate_pair_is_a_question_mark(tmp_path):
    assert texts(made(tmp_path, PLAIN), [SECRET, says("assistant", "a\ud83db")])[1] == "a?b<|end|>"


def test_it_is_always_the_same_day_for_a_template(tmp_path):
    """Cached tokens would otherwise be those of the day on which they were made."""
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}" + PLAIN
    whole, _ = texts(made(tmp_path, dated), [SECRET, says("assistant", "yes")])
    assert whole.startswith("26 Jul 2024<|user|>secret")
    with pytest.raises(PlaitError, match="the chat template refuses this conversation"):
        texts(made(tmp_path, "{{ strftime_now('%' ~ 'd') }}" + PLAIN), [SECRET])
