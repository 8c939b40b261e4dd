"""Sources of text, which a tokenizer turns into tokens: the options that they share."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import attrs

from plait import PlaitError, Source, misfit, no_default
from plait_data.tokenizer import Tokenizer, load

Say = Callable[[str], None]


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
    """

    tokenizer: str = "auto"
    eod_token: str | None = None
    bod_token: str | None = None
    attention: str = attrs.field(default="across", validator=check_attention)

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

    def decoded(self, ids: Sequence[int]) -> str:
        return self.encoder.decode(ids)

    def special_ids(self) -> tuple[list[int], int | None]:
        special = getattr(self.encoder, "special", None)
        if special is None:
            return [], None
        ends = [] if self.eod_token is None and special.eos is None else [self.encoder.eod]
        return [*ends, *sorted(special.stops - {*ends})], special.bos
