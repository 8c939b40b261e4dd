"""Masked tokens, to be predicted from those on both sides of them, over any source of text."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import attrs
import numpy as np

from plait import Batches, PlaitError, Source, misfit
from plait_data.inner import naming, with_target
from plait_data.masks import MaskedBatches, Masks
from plait_data.special_tokens import token_id
from plait_data.text_source import Say
from plait_data.word_starts import starts_of_words

USUAL = ("[MASK]", "<mask>", "<|mask|>", "<MASK>")  # names of the token that hides others
WITHOUT = ("chat", "masked", "mix", "pairs")  # sources that do not give plain text
KEY = "data.source"


def _share(_: Any, __: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise misfit("data.rate", value, "a share above 0 and below 1")


def _three_shares(_: Any, __: Any, value: Any) -> None:
    numbers = isinstance(value, Sequence) and all(type(x) in (int, float) for x in value)
    if not numbers or len(value) != 3 or min(value) < 0 or abs(sum(value) - 1) > 1e-9:
        raise misfit("data.replaced", value, "three shares that add up to 1: mask, random token, unchanged")


@attrs.define(kw_only=True, slots=False)
class Masked(Source):
    """Samples of `source` in which some tokens are hidden; these are the labels (Devlin et al., arXiv:1810.04805).

    source: config of a source of text, with `kind`, the name of an installed one, or `_target_`.
    tokenizer: of the source; "auto": as the source takes it.
    mask_token: the token that hides others; None: the one that the tokenizer's folder names.
    rate: share of the tokens to predict. replaced: of these, the shares that become the mask token, become a random
        token, and stay.
    whole_words: all tokens of a word are to be predicted, or none.
    """

    hides: ClassVar[bool] = True

    source: Any
    tokenizer: str = "auto"
    mask_token: str | None = None
    rate: float = attrs.field(default=0.15, validator=_share)
    replaced: Any = attrs.field(default=(0.8, 0.1, 0.1), validator=_three_shares)
    whole_words: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.source, Mapping):
            raise misfit(KEY, self.source, "a data config, such as {kind: text, path: book.txt}")
        if (own := self.source.get("tokenizer", "auto")) != "auto":
            raise PlaitError(
                f"{KEY}.tokenizer={own}: set data.tokenizer, which the source, its masks and an export share"
            ).at(f"{KEY}.tokenizer", own, fits="auto")

    @cached_property
    def inner(self) -> Any:
        """The source of text."""
        from plait.host import build_source

        node = with_target(self.source, KEY, WITHOUT)
        with naming(KEY, "tokenizer"):
            made = build_source({**node, "tokenizer": self.tokenizer}, KEY)
        if hasattr(made, "template") or not hasattr(made, "encoder"):
            raise PlaitError(f"{KEY} is a {type(made).__name__}, which does not give plain text: take text or hf").at(
                KEY, type(made).__name__, fits="a source of text, such as text, stdlib or hf"
            )
        return made

    @property
    def indexable(self) -> bool:  # type: ignore[override]
        return bool(self.inner.indexable)

    @property
    def attention(self) -> str:
        """What tokens of a sample see each other, as the source says it."""
        return str(self.inner.attention)

    @property
    def vocabulary(self) -> int | None:
        return int(self.inner.vocabulary)

    @property
    def has_validation(self) -> bool:
        return bool(self.inner.has_validation)

    @cached_property
    def masks(self) -> Masks:
        """What is hidden, and by what."""
        encoder, name = self.inner.encoder, self.inner.tokenizer
        vocab: dict[str, int] = getattr(encoder, "vocab", {})
        if not vocab:
            raise PlaitError(f"data.tokenizer={name} has no mask token, which hides others: take another tokenizer").at(
                "data.tokenizer", name, fits="a folder or a file with a tokenizer that has a mask token"
            )
        token = self.mask_token or encoder.special.mask
        if token is None:
            usual = [each for each in USUAL if each in vocab]
            if len(usual) != 1:
                raise PlaitError(
                    f"data.tokenizer={name} does not say which token hides others: set data.mask_token"
                ).at("data.mask_token", None, fits="a token of the tokenizer")
            (token,) = usual
        mask = token_id("data.mask_token", token, name, vocab)
        never = sorted(
            {vocab[each] for each in encoder.special.special & vocab.keys()} | {encoder.eod, mask, *encoder.begins}
        )
        starts = starts_of_words(name, vocab, never) if self.whole_words else None
        ordinary = np.setdiff1d(np.fromiter(vocab.values(), np.int64), never)
        return Masks(mask, np.array(never), ordinary, self.rate, tuple(map(float, self.replaced)), starts)

    def check(self, *, seq_len: int, vocab_size: int | None) -> None:
        with naming(KEY, "tokenizer"):
            self.inner.check(seq_len=seq_len, vocab_size=vocab_size)
        _ = self.masks

    def prepare(self, say: Say) -> None:
        with naming(KEY, "tokenizer"):
            self.inner.prepare(say)

    def check_length(self, *, seq_len: int) -> None:
        with naming(KEY, "tokenizer"):
            self.inner.check_length(seq_len=seq_len)

    def shortened(self, *, seq_len: int) -> str:
        return str(self.inner.shortened(seq_len=seq_len))

    def special_ids(self) -> tuple[list[int], int | None]:
        ends, begin = self.inner.special_ids()
        return list(ends), begin

    def decoded(self, ids: Sequence[int]) -> str:
        return str(self.inner.decoded(ids))

    def encoded(self, text: str) -> list[int]:
        return list(self.inner.encoded(text))

    def fingerprint(self) -> str:
        """Of the text and of what hides it."""
        how = (self.rate, self.masks.replaced, self.whole_words, self.masks.mask)
        return hashlib.sha256(repr((self.inner.fingerprint(), how)).encode()).hexdigest()

    def open(self, *, seq_len: int, seed: int, global_batch_size: int, dp: tuple[int, int]) -> Batches:
        with naming(KEY, "tokenizer"):
            batches = self.inner.open(seq_len=seq_len, seed=seed, global_batch_size=global_batch_size, dp=dp)
        return MaskedBatches(batches, self.masks, seed)
