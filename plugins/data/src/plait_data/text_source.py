"""Sources of text, which a tokenizer turns into tokens: the options that they share."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import attrs

from plait import Batches, PlaitError, Source, misfit, no_default
from plait_data.tokenizer import Tokenizer, load
from plait_data.validation_sets import WithSets, blaming_set, by_name, check_paths

Say = Callable[[str], None]
T = TypeVar("T")


def check_attention(_: Any, __: Any, value: Any) -> None:
    if value not in ("across", "document"):
        raise misfit("data.attention", value, "'across' or 'document'")


def given(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or value in ("", "???"):  # "???" marks a key without a default in a config
        raise no_default(f"data.{attribute.name}")


def at_least(least: int) -> Callable[[Any, Any, Any], None]:
    def validate(_: Any, attribute: Any, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise misfit(f"data.{attribute.name}", value, f"a whole number of at least {least}")

    return validate


@attrs.define(kw_only=True, slots=False)
class TextSource(Source):
    """A source of documents in words.

    tokenizer: "bytes", a file of the library `tokenizers`, or a folder with a `tokenizer.json`; "auto": bytes, unless
        the core has filled in the model's folder.
    eod_token: the token that ends a document; None takes the one that the tokenizer's folder names.
    bod_token: the token that begins a document; "none": no token; None takes what the tokenizer itself writes.
    attention: "across": tokens attend to all before them in their sample; "document": only to those of their document.
    validation_path: files to validate on; their text is not trained on. Several by name have a loss each.
    """

    tokenizer: str = "auto"
    eod_token: str | None = None
    bod_token: str | None = None
    attention: str = attrs.field(default="across", validator=check_attention)
    validation_path: Any = attrs.field(default=None, validator=check_paths)

    @cached_property
    def encoder(self) -> Tokenizer:
        """The tokenizer, loaded."""
        return load(self.tokenizer, self.eod_token, self.bod_token)

    @property
    def vocabulary(self) -> int:
        return self.encoder.size

    def check(self, *, seq_len: int, vocab_size: int | None) -> None:
        size = self.vocabulary
        if vocab_size is not None and size > vocab_size:
            raise PlaitError(
                f"data.tokenizer={self.tokenizer} has {size} tokens but model.vocab_size={vocab_size}: "
                f"set model.vocab_size to at least {size}, or take a smaller tokenizer"
            ).at("model.vocab_size", vocab_size, fits=f"at least {size}")
        super().check(seq_len=seq_len, vocab_size=vocab_size)
        self.of_sets(lambda each: each.check(seq_len=seq_len, vocab_size=vocab_size))

    @abstractmethod
    def at(self, path: str) -> Source:
        """The source of the files at `path`, to validate on: read as those of this source, or as text."""

    @cached_property
    def sets(self) -> dict[str, Source]:
        """Name -> source of the files of `validation_path`; "" is the name of a single path."""
        return {name: self.at(path) for name, path in by_name(self.validation_path).items()}

    def of_sets(self, call: Callable[[Source], T]) -> dict[str, T]:
        """Name -> what `call` returns for the source of each validation set. Errors name the set."""
        found = {}
        for name, path in by_name(self.validation_path).items():
            with blaming_set(name, path):
                found[name] = call(self.sets[name])
        return found

    def prepare_sets(self, say: Say) -> None:
        """Prepare the sources of the validation sets; lines about them name the set."""
        for name, path in by_name(self.validation_path).items():
            with blaming_set(name, path):
                self.sets[name].prepare(_named(say, f"validation{f' {name}' * bool(name)}"))

    def beside(self, batches: Batches, seed: int) -> Batches:
        """`batches`, and those of the validation sets."""
        length, size, dp = batches.seq_len, batches.global_batch_size, batches.dp
        sets = self.of_sets(lambda each: each.open(seq_len=length, seed=seed, global_batch_size=size, dp=dp))
        return WithSets(batches, sets) if sets else batches

    def decoded(self, ids: Sequence[int]) -> str:
        return self.encoder.decode(ids)

    def encoded(self, text: str) -> list[int]:
        return [*self.encoder.begins, *self.encoder.encode([text.encode()])[0].tolist()]

    def prompted(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        from plait_data.template import Conversation, Template, template_of

        folder = Path(self.tokenizer).expanduser()
        if not folder.is_dir():
            raise misfit("data.tokenizer", self.tokenizer, "a folder with tokenizer.json and a chat template")
        if find_spec("transformers") is None:
            raise PlaitError("a chat template needs the library transformers: pip install 'plait-data[chat]'").at(
                "data.template"
            )
        template = Template(folder, template_of(folder, getattr(self, "template", None)))
        return template.prompted(Conversation([*map(dict, messages)], None, "the prompt"))

    def special_ids(self) -> tuple[list[int], int | None]:
        special = getattr(self.encoder, "special", None)
        if special is None:
            return [self.encoder.eod], None
        ends = [] if self.eod_token is None and special.eos is None else [self.encoder.eod]
        return [*ends, *sorted(special.stops - {*ends})], special.bos


def _named(say: Say, what: str) -> Say:
    return lambda line: say(f"{what}: {line}")
