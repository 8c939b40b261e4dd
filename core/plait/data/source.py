"""The interface of every data source, and the options that all sources share."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from plait.contract.errors import PlaitError, misfit, no_default
from plait.data.tokenizer import Tokenizer, load
from plait.strategies.blame import blaming
from plait.strategies.registry import name_of

if TYPE_CHECKING:  # a source is created and checked without torch
    from plait.data.batches import Batches

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


def blaming_source(source: Any, method: str) -> AbstractContextManager[None]:
    """Errors raised inside name the source and its method; those of the core's own are sentences by themselves."""
    if source is None or type(source).__module__.startswith("plait."):
        return nullcontext()
    return blaming(name_of(source, "source"), f"method {method!r}", "source")


OPTIONAL = ("shortened",)  # methods of a source that one which is no `Source` may lack


def said_of_shortened(source: Any, seq_len: int) -> str:
    """What `Source.shortened` says; "" if the source has no such method."""
    return source.shortened(seq_len=seq_len) if hasattr(source, "shortened") else ""


@attrs.define(kw_only=True, slots=False)
class Source(ABC):
    """Data as a config names it. In order: `check` and `prepare` in the parent or once per machine, `open` in each
    rank.

    tokenizer: "bytes", a file of the library `tokenizers`, or a folder with a `tokenizer.json`; "auto": bytes, unless
        the core has filled in the model's folder.
    eod_token: the token that ends a document; None takes the one that the tokenizer's folder names.
    bod_token: the token that begins a document; "none": no token; None takes what the tokenizer itself writes.
    attention: "across": tokens attend to all before them in their sample; "document": only to those of their document.
    indexable: whether any batch is available at any time, so that a run resumes with any number of data ranks. Of
        another source a checkpoint keeps `Batches.state_dict`.

    Every method raises PlaitError that names the key.
    """

    tokenizer: str = "auto"
    eod_token: str | None = None
    bod_token: str | None = None
    attention: str = attrs.field(default="across", validator=check_attention)

    indexable: ClassVar[bool]

    @cached_property
    def encoder(self) -> Tokenizer:
        """The tokenizer, loaded."""
        return load(self.tokenizer, self.eod_token, self.bod_token)

    @property
    @abstractmethod
    def has_validation(self) -> bool:
        """Whether `Batches.validation` has any samples."""

    def check(self, *, seq_len: int, vocab_size: int | None) -> None:
        """Cheap checks before any rank starts, in the launcher; imports no torch. vocab_size: the model's; None: it has
        none."""
        if seq_len < 1:
            raise misfit("train.seq_len", seq_len, "at least 1")
        size = self.encoder.size
        if vocab_size is not None and size > vocab_size:
            raise PlaitError(
                f"data.tokenizer={self.tokenizer} has {size} tokens but model.vocab_size={vocab_size}: "
                f"set model.vocab_size to at least {size}, or take a smaller tokenizer"
            ).at("model.vocab_size", vocab_size, fits=f"at least {size}")

    def prepare(self, say: Say) -> None:  # noqa: B027 (most have nothing to do)
        """Do slow work once per machine before training, and report it with `say(line)`. Safe to call from several
        processes at once."""

    def check_length(self, *, seq_len: int) -> None:  # noqa: B027 (most have nothing to do)
        """After `prepare`: raises PlaitError if there is too little text for one sample; cheap."""

    def shortened(self, *, seq_len: int) -> str:
        """After `check_length`: what of the data no sample holds because it is too long, in words; "" if nothing."""
        return ""

    @abstractmethod
    def fingerprint(self) -> str:
        """Hex digest of what determines the tokens, beside the seed; after `prepare`, on every rank. A checkpoint keeps
        it."""

    @abstractmethod
    def open(self, *, seq_len: int, seed: int, global_batch_size: int, dp: tuple[int, int]) -> "Batches":
        """The batches of one data rank: its part of every global batch. dp: (index, count) of the data rank."""
