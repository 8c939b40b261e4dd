"""The interface of every data source, and the calls that the core makes of one that is no `Source`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import attrs

from plait.contract.errors import PlaitError, misfit
from plait.data.batches import Batches
from plait.strategies.blame import blaming
from plait.strategies.registry import name_of

Say = Callable[[str], None]


@attrs.define(kw_only=True, slots=False)
class Source(ABC):
    """Data as a config names it. In order: `check` and `prepare` in the parent or once per machine, `open` in each
    rank.

    indexable: whether any batch is available at any time. Another source is read in `train.data_parts` parts, each as
        one of so many data ranks; of each part a checkpoint keeps `Batches.state_dict`.
    hides: whether labels are tokens that were hidden, each at its own place, for models whose tokens see both sides.
        False: a label is the token that follows.

    A source whose batches have positions, because tokens see none but their document, says so by an attribute
    `attention = "document"`; a plan counts what that costs.

    Every method raises PlaitError that names the key.
    """

    indexable: ClassVar[bool]
    hides: ClassVar[bool] = False

    @property
    def vocabulary(self) -> int | None:
        """How many tokens there are: ids are below it. None: not known."""
        return None

    @property
    @abstractmethod
    def has_validation(self) -> bool:
        """Whether `Batches.validation` has any samples."""

    def check(self, *, seq_len: int, vocab_size: int | None) -> None:
        """Cheap checks before any rank starts, in the launcher; imports no torch. vocab_size: the model's; None: it has
        none."""
        if seq_len < 1:
            raise misfit("train.seq_len", seq_len, "at least 1")
        if vocab_size is not None and (size := self.vocabulary) is not None and size > vocab_size:
            raise PlaitError(
                f"data has {size} different tokens but model.vocab_size={vocab_size}: "
                f"set model.vocab_size to at least {size}"
            ).at("model.vocab_size", vocab_size, fits=f"at least {size}")

    def prepare(self, say: Say) -> None:  # noqa: B027 (most have nothing to do)
        """Do slow work once per machine before training, and report it with `say(line)`. Safe to call from several
        processes at once."""

    def check_length(self, *, seq_len: int) -> None:  # noqa: B027 (most have nothing to do)
        """After `prepare`: raises PlaitError if there is too little text for one sample; cheap."""

    def shortened(self, *, seq_len: int) -> str:
        """After `check_length`: what of the data no sample holds because it is too long, in words; "" if nothing."""
        return ""

    def resumed(self, before: Mapping[str, Any], samples: int) -> dict[str, Any]:
        """What changes in the node `data` of a run that goes on after `samples` samples under this source. before: the
        node under which they were taken. Raises PlaitError if it cannot go on."""
        return {}

    def special_ids(self) -> tuple[list[int], int | None]:
        """(ids that end a text or an answer, the id that begins a text or None): those of the tokenizer. An export
        names them in the files beside the weights, and what a model writes ends there."""
        return [], None

    def decoded(self, ids: Sequence[int]) -> str:
        """The tokens as text that people read: their numbers, unless the source has words for them."""
        return "".join(f"{number} " for number in ids)

    def encoded(self, text: str) -> list[int]:
        """The tokens of the beginning of a text, which a model is to continue: those that begin a document, too."""
        raise PlaitError(f"data of {type(self).__name__} has no tokenizer for words").at("data.tokenizer")

    def prompted(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation up to where its next answer begins. messages: each {"role", "content", ...}."""
        raise PlaitError(f"data of {type(self).__name__} has no chat template").at("data.tokenizer")

    @abstractmethod
    def fingerprint(self) -> str:
        """Hex digest of what determines the tokens, beside the seed; after `prepare`, on every rank. A checkpoint keeps
        it."""

    @abstractmethod
    def open(self, *, seq_len: int, seed: int, global_batch_size: int, dp: tuple[int, int]) -> Batches:
        """The batches of one data rank: its part of every global batch. dp: (index, count) of the data rank; of the
        part, if the source is not `indexable`."""


# methods that a source which is no `Source` may lack
OPTIONAL = ("shortened", "resumed", "special_ids", "decoded", "encoded", "prompted")


def shortened(source: Any, seq_len: int) -> str:
    """What `Source.shortened` returns; "" if the source has no such method."""
    return source.shortened(seq_len=seq_len) if hasattr(source, "shortened") else ""


@contextmanager
def blaming_source(source: Any, method: str) -> Iterator[None]:
    """Errors raised inside name the source and its method, but for a PlaitError: its sentence says enough."""
    try:
        yield
    except BaseException as error:
        if source is None or isinstance(error, PlaitError):
            raise
        with blaming(name_of(source, "source"), f"method {method!r}", "source"):
            raise
