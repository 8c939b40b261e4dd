"""The fingerprint of data, which is the key of its cache, knows all that changes tokens, and little else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from plait_data import chat, conversations, indexed, tokenizer
from plait_data.chat import Chat
from plait_data.hf import Hf
from plait_data.text import Text

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ("<bos>", "<eos>", "<end>")
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
CONFIG = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}


class Here:
    """A folder with a tokenizer and files, as they are before anything changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.options: dict[str, Any] = {"validation_fraction": 0.1}
        self.inner = Tokenizer(models.BPE({token: number for number, token in enumerate(ALPHABET)}, []))
        self.inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.inner.add_special_tokens(list(SPECIAL))
        self.inner.add_tokens(["<tag>"])
        self.save()
        self.config()
        self.write("corpus/a.txt", "first text")
        self.write("corpus/b.txt", "second")
        self.write("corpus/c.jsonl", '{"text": "a row", "title": "its title"}\n')
        chats = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        self.write("chats.jsonl", json.dumps({"messages": chats, "turns": chats[:2]}) + "\n")

    def write(self, name: str, content: str | bytes) -> None:
        file = self.folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    def save(self) -> None:
        self.inner.save(str(self.folder / "tokenizer.json"))

    def config(self, **changes: Any) -> None:
        self.write("tokenizer_config.json", json.dumps({**CONFIG, **changes}))

    def set(self, **options: Any) -> None:
        self.options.update(options)

    def rename(self, old: str, new: str) -> None:
        (self.folder / old).rename(self.folder / new)

    def text(self) -> str:
        options = {"path": str(self.folder / "corpus"), "tokenizer": str(self.folder), **self.options}
        return Text(**options).fingerprint()

    def chat(self) -> str:
        options = {"path": str(self.folder / "chats.jsonl"), "tokenizer": str(self.folder), **self.options}
        return Chat(**options).fingerprint()

    def stream(self) -> str:
        options = {"name": "json", "data_files": ["a"], "tokenizer": str(self.folder), **self.options}
        return Hf(**{key: value for key, value in options.items() if key != "validation_fraction"}).fingerprint()


def begins(here: Here) -> None:
    bos = here.inner.token_to_id("<bos>")
    here.inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    here.save()


def normalizer(here: Here) -> None:
    here.inner.normalizer = normalizers.Lowercase()
    here.save()


def more_tokens(here: Here) -> None:
    here.inner.add_tokens(["text"])
    here.save()


Change = Callable[[Here], None]
OF_ENCODER: dict[str, Change] = {
    "a normaliser": normalizer,
    "an added token": more_tokens,
    "how a text begins": begins,
    "how a text begins, by the config": lambda here: here.config(add_bos_token=True),
    "the end, by the config": lambda here: here.config(eos_token="<end>"),
    "the end, by the map": lambda here: here.write("special_tokens_map.json", '{"eos_token": "<end>"}'),
    "the end, by option": lambda here: here.set(eod_token="<end>"),
    "what is special": lambda here: here.config(extra_special_tokens=["<tag>"]),
    "what is special, by id": lambda here: here.config(
        added_tokens_decoder={"259": {"content": "<tag>", "special": True}}
    ),
}
OF_TEXT: dict[str, Change] = {
    **OF_ENCODER,
    "bytes": lambda here: here.set(tokenizer="bytes"),
    "another beginning, by option": lambda here: here.set(bod_token="<end>"),
    "the content of a file": lambda here: here.write("corpus/b.txt", "secont"),
    "a file more": lambda here: here.write("corpus/d.txt", "third"),
    "the order of files": lambda here: here.rename("corpus/a.txt", "corpus/d.txt"),
    "the kind of a file": lambda here: here.rename("corpus/c.jsonl", "corpus/c.txt"),
    "text_key": lambda here: here.set(text_key="title"),
    "validation_fraction": lambda here: here.set(validation_fraction=0.2),
}
OF_CHAT: dict[str, Change] = {
    **OF_ENCODER,
    "the template": lambda here: here.config(chat_template=TEMPLATE + " "),
    "a template's file": lambda here: here.write("chat_template.jinja", TEMPLATE + " "),
    "a name in the template": lambda here: here.config(bos_token="<end>"),
    "a token by the config alone": lambda here: here.write("added_tokens.json", '{"<more>": 260}'),
    "messages_key": lambda here: here.set(messages_key="turns"),
    "validation_fraction": lambda here: here.set(validation_fraction=0.2),
    "the content of a file": lambda here: here.write("chats.jsonl", '{"messages": []}\n'),
}
OF_STREAM: dict[str, Change] = {
    **OF_ENCODER,
    "another beginning, by option": lambda here: here.set(bod_token="<end>"),
    **{
        key: lambda here, key=key, value=value: here.set(**{key: value})  # type: ignore[misc]
        for key, value in {
            "config": "x",
            "data_files": ["b"],
            "split": "test",
            "text_key": "title",
            "shuffle_buffer": 7,
            "validation_split": "x",
            "validation_documents": 7,
        }.items()
    },
}
KEPT: dict[str, Change] = {
    "names in the same order": lambda here: here.rename("corpus/a.txt", "corpus/aa.txt"),
    "an empty file": lambda here: here.write("corpus/d.txt", ""),
    "a picture": lambda here: here.write("corpus/d.png", b"\x89PNG"),
    "attention": lambda here: here.set(attention="document"),
    "the end by both ways": lambda here: here.set(eod_token="<eos>"),
    "no beginning, by option": lambda here: here.set(bod_token="none"),
    "a key that names no token": lambda here: here.config(model_max_length=7),
}


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


@pytest.mark.parametrize("change", OF_TEXT)
def test_text(here: Here, change: str) -> None:
    before = here.text()
    OF_TEXT[change](here)
    assert here.text() != before


@pytest.mark.parametrize("change", OF_CHAT)
def test_chat(here: Here, change: str) -> None:
    before = here.chat()
    OF_CHAT[change](here)
    assert here.chat() != before


@pytest.mark.parametrize("change", OF_STREAM)
def test_stream(here: Here, change: str) -> None:
    before = here.stream()
    OF_STREAM[change](here)
    assert here.stream() != before


@pytest.mark.parametrize("change", KEPT)
def test_what_changes_no_token_changes_nothing(here: Here, change: str) -> None:
    before = here.text()
    KEPT[change](here)
    assert here.text() == before


def test_a_byte_order_mark_is_in_no_digest(here: Here) -> None:
    """Caches of such files that hold its three tokens, made by older versions, are not taken."""

    def digests() -> list[str]:
        return [digest for _, digest in Text(path=str(here.folder / "corpus/a.txt"))._content(print)]

    before = digests()
    here.write("corpus/a.txt", b"\xef\xbb\xbffirst text")
    assert digests() == before


@pytest.mark.parametrize(
    ("module", "name", "of"),
    [
        (tokenizers, "__version__", ("text", "chat")),
        (tokenizer, "ENCODER", ("text", "chat")),
        (indexed, "FORMAT", ("text",)),
        (conversations, "FORMAT", ("chat",)),
        (chat, "version", ("chat",)),
    ],
)
def test_another_version_of_the_code(
    here: Here, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, of: tuple[str, ...]
) -> None:
    before = [getattr(here, one)() for one in of]
    monkeypatch.setattr(module, name, (lambda package: "0") if callable(getattr(module, name)) else 77)
    assert not set(before).intersection(getattr(here, one)() for one in of)


def test_bytes_do_not_depend_on_a_library(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.set(tokenizer="bytes")
    before = here.text()
    monkeypatch.setattr(tokenizers, "__version__", "77")
    monkeypatch.setattr(tokenizer, "ENCODER", 77)
    assert here.text() == before
