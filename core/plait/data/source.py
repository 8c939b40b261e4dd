"""What every source of data promises, and the options that all of them share."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from plait.contract.errors import PlaitError
from plait.data.tokenizer import Tokenizer, load

if TYPE_CHECKING:  # a source is made and checked where torch is not imported
    from plait.data.batches import Batches

Say = Callable[[str], None]


def check_attention(_: Any, __: Any, value: Any) -> None:
    if value not in ("across", "document"):
        raise PlaitError(f"data.attention={value!r} is neither 'across' nor 'document'")


def given(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or value in ("", "???"):  # the latter is how a config says that it has no default
        raise PlaitError(f"data.{attribute.name} must be given; it has no default")


def at_least(least: int) -> Callable[[Any, Any, Any], None]:
    def validate(_: Any, attribute: Any, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise PlaitError(f"data.{attribute.name}={value!r} must be a whole number of at least {least}")

    return validate


@attrs.define(kw_only=True, slots=False)
class Source(ABC):
    """Data as a config names it. In order: `check` and `prepare` in the parent or once a machine, `open` in each rank.

    tokenizer: "bytes", a file of the library `tokenizers`, or a folder with a `tokenizer.json`.
    eod_token: the token that ends a document; None takes the usual one of the tokenizer.
    attention: "across": tokens attend to all before them in their sample; "document": to those of their document.

    Raises PlaitError, naming the key, from every method.
    """

    tokenizer: str = "bytes"
    eod_token: str | None = None
    attention: str = attrs.field(default="across", validator=check_attention)

    indexable: ClassVar[bool]  # True: any batch can be had at any time, so a run resumes at any number of shares

    @cached_property
    def encoder(self) -> Tokenizer:
        """The tokenizer, loaded."""
        return load(self.tokenizer, self.eod_token)

    @property
    @abstractmethod
    def has_validation(self) -> bool:
        """Whether `Batches.validation` has something to give."""

    def check(self, *, seq_len: int, vocab_size: int | None) -> None:
        """Cheap checks before any rank starts; imports no torch. `vocab_size`: the model's; None: it has none."""
        if seq_len < 1:
            raise PlaitError(f"train.seq_len={seq_len} must be at least 1")
        size = self.encoder.size
        if vocab_size is not None and size > vocab_size:
            raise PlaitError(
                f"data.tokenizer={self.tokenizer} has {size} tokens but model.vocab_size={vocab_size}: "
                f"set model.vocab_size to at least {size}, or take a smaller tokenizer"
            )

    def prepare(self, say: Say) -> None:  # noqa: B027 (most have nothing to do)
        """Do once a machine what takes long, reporting by `say(line)`. Safe from several processes at once."""

    def fits(self, *, seq_len: int) -> None:  # noqa: B027 (most have nothing to do)
        """After `prepare`: raise PlaitError where there is too little text for one sample; cheap."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Hex digest of what the tokens are made of; after `prepare`."""

    @abstractmethod
    def open(self, *, seq_len: int, seed: int, global_batch_size: int, share: tuple[int, int]) -> "Batches":
        """The batches of share `(index, count)` of every global batch."""
