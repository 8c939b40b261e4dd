"""What may watch a run: the moments of a step, and what a run tells between its steps.

A class takes the moments that it needs; the others do nothing. Moments only watch: a step is the same without them.
Between steps an observer may change what it changes back, as for a validation, and end the run.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `import plait` must not import torch
    from torch import Tensor
    from torch.optim import Optimizer

    from plait.contract.batch import Batch


class Observer:
    """The moments of one step on this rank, in their order. Each is called before what it names begins. A validation
    has none of them."""

    def start(self, step: int) -> None:
        """Step `step` (from 1): its batch is dealt."""

    def count(self, batch: "Batch") -> None:
        """The tokens of the step are counted. batch: this rank's rows, dealt, before they are split and moved."""

    def forward(self, micro: int) -> None:
        """Micro-batch `micro` (from 0) goes into the model; stages may take it in long before it runs."""

    def loss(self, micro: int, logits: "Tensor | None") -> None:
        """The loss of micro-batch `micro` is computed; logits None: the head has computed it already."""

    def backward(self, micro: int) -> None:
        """The loss of micro-batch `micro` goes to backward, which stages may run later."""

    def clip(self) -> None:
        """Clipping begins: all gradients of the step are complete."""

    def optimizer(self) -> None:
        """The optimizer's step begins; then gradients are released."""

    def balance(self) -> None:
        """Parameters are new; the counts of experts are added up."""

    def after(self) -> None:
        """Strategies' `after_step` is called."""


class RunObserver(Observer):
    """Watches a whole run on this rank: its steps, and what lies between them.

    With a method `state(self, applied)` it keeps tensors in checkpoints, by name: the live ones, and the same at every
    call. They are filled before `begin`, where `plait.is_loaded` tells whether a checkpoint had each.
    """

    def begin(self, applied: Any, optimizer: "Optimizer") -> None:
        """Training begins or goes on, after a checkpoint was loaded. applied: a `plait.Applied`:
        `applied.run` has `log` and `stop`, `applied.parts` the model."""

    def validate(self, step: int) -> None:
        """A validation begins, after step `step`. What is changed for it, `validated` changes back."""

    def validated(self, step: int, loss: float) -> None:
        """The validation is over. loss: its mean over tokens, the same on all ranks; it stands in the step's row."""

    def doing(self, what: str) -> None:
        """The run begins `what`, which may take long: "step 41", "the export of the weights"."""

    def row(self, row: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, of every step, once its values are on the host: mostly one step later."""

    def end(self, step: int) -> None:
        """Step `step` is done, with its validation and its save, if it had them."""


MOMENTS = tuple(name for kind in (Observer, RunObserver) for name in vars(kind) if not name.startswith("_"))


class Together(RunObserver):
    """Several observers as one: each moment goes to all of them, in their order. More may be appended to `all`."""

    def __init__(self, observers: Iterable[Any] = ()) -> None:
        self.all: list[Any] = list(observers)


def every_moment(observer: Any) -> Observer:
    """`observer` with every moment: one that has only some, or None, does nothing in the others."""
    return observer if isinstance(observer, Observer) else Together([] if observer is None else [observer])


def _to_all(name: str) -> Any:
    """The method `name` of `Together`. An observer need not have every moment, nor a base class."""

    def moment(self: Together, *arguments: Any) -> None:
        for each in self.all:
            if (own := getattr(each, name, None)) is not None:
                own(*arguments)

    return moment


for _name in MOMENTS:
    setattr(Together, _name, _to_all(_name))
