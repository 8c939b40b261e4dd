"""A loss of whole sequences, as a step calls it: a function of the sum of log-probabilities of each row.

Each rank sums what it has of a row, and the ranks that have the row's other parts add their sums. The loss is computed
from the whole sums on all of them, and its derivative by each sum is the weight of the row. So backward is a weighted
sum over the tokens that a rank has, which needs no exchange: gradients are exact in every layout.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from plait.contract.batch import IGNORE, NO_TEXT, Batch, without_wait
from plait.contract.config import Config
from plait.contract.errors import PlaitError, short
from plait.contract.planned import is_planning
from plait.ops.loss import Compiler
from plait.parallel.plugin_loss import PluginLoss, made_loss, with_vocab
from plait.strategies.blame import WrongAnswer, blaming
from plait.strategies.registry import described, installed, load
from plait.system.torch_internals.collectives import reduced

if TYPE_CHECKING:
    from plait.parallel.mesh import Mesh

METHOD = "method 'of_sequences'"


@attrs.frozen(eq=False)
class Sequences:
    """The rows of a micro-batch, for a loss of sequences: each row is one sequence, whatever ranks hold it.

    logps: (B,) float64, the sum of the log-probabilities of each row's labels.
    tokens: (B,) float64, how many labels each row has.
    marks: (B,) int64, as `Batch.marks`.
    reference: (B,) float64, `logps` under the weights at the start of the run; zeros if the loss asks for none.
    """

    logps: Tensor
    tokens: Tensor
    marks: Tensor
    reference: Tensor


class SequenceLoss:
    """`made.of_sequences` for the logits of a micro-batch.

    group: consecutive rows that belong together, over which the loss is summed and by whose number it is divided.
    reference: (N,) float64 on the CPU, by `Batch.texts`: what `Sequences.reference` has; None: not known yet.
    recording: a table like it, into which the sums of the next micro-batches go in place of a loss; None: none.
    columns: name -> (2,) float64: the sum and the number of its values that are numbers, since it was emptied.
    """

    def __init__(self, name: str, made: Any, mesh: "Mesh", config: Config) -> None:
        self.name, self.made, self.group = name, made, int(getattr(made, "group", 1))
        self.needs_reference = bool(getattr(made, "reference", False))
        self.places = self.group * config.train.seq_len  # tokens of a group, with what fills up its rows
        dense = mesh.layout.dense
        self._axes = [mesh[axis.name] for axis in dense if axis.splits == "sequence" and axis.degree > 1]
        self._counts = mesh.rank_and_size("sequence")[0] == 0  # of the ranks with parts of a row, one counts for it
        self.reference: Tensor | None = None
        self.recording: Tensor | None = None
        self.columns: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def recorded(self, table: Tensor) -> Iterator[None]:
        """Inside, the sums of micro-batches go into `table`; afterwards all ranks have those of all. Collective."""
        self.recording = table
        yield
        self.recording = None
        dist.all_reduce(table, dist.ReduceOp.MAX)  # ranks that hold one row have one number

    def units(self, batch: Batch) -> int:
        """How many groups of rows this rank counts for."""
        return len(_real(batch)) // self.group * self._counts

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """Summed over the groups of rows that this rank counts for: float64, without dims. logits: as a `PluginLoss`
        takes them. Collective over the ranks with parts of these rows."""
        self._check_rows(batch)
        logps, vocab = with_vocab(logits, True)
        valid = batch.labels != IGNORE
        logps = (vocab.pick(logps, batch.labels) - vocab.logsumexp(logps)).where(valid, 0)
        own = logps.sum(1, dtype=torch.float64)
        sums = torch.stack([own.detach(), valid.sum(1, dtype=torch.float64)])
        for axis in self._axes:
            sums = reduced(sums, "sum", axis)
        if len(real := _real(batch)) < len(batch.tokens):  # in an evaluation
            sums = sums[:, without_wait(real, sums.device)]
            batch = attrs.evolve(batch, **{name: getattr(batch, name)[real] for name in ("tokens", "marks", "texts")})
        if self.recording is not None:
            self.recording[batch.texts] = sums[0].to(self.recording.device)
        if self.recording is not None or not len(real):
            return own.new_zeros(())
        loss, weights = self._of(sums, batch)
        value = loss if self._counts else torch.zeros_like(loss)
        if not torch.is_grad_enabled():
            return value
        by_weight = (weights * own).sum()
        return value + (by_weight - by_weight.detach())

    def _of(self, sums: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(the loss of these sums, its derivative by each row's); its columns are added to `columns`."""
        assert batch.marks is not None
        logps = sums[0].detach().requires_grad_()
        with torch.enable_grad(), blaming(self.name, METHOD, "loss"):
            marks, reference = (without_wait(x, sums.device) for x in (batch.marks, self._reference(batch)))
            rows = Sequences(logps, sums[1], marks, reference)
            answer = self.made.of_sequences(rows)
        loss, columns = answer if isinstance(answer, tuple) and len(answer) == 2 else (None, {})
        who = described(self.name, "loss")
        if not isinstance(loss, Tensor) or loss.dim() or loss.dtype != torch.float64 or not loss.requires_grad:
            raise WrongAnswer(
                f"{who} returned {short(repr(answer))} from its {METHOD}, which must return (the sum of the loss over "
                "the groups of rows, columns): a float64 tensor without dims that depends on `logps`, and tensors by "
                "name"
            )
        if torch.is_grad_enabled():
            for name, values in columns.items():
                if name not in self.made.columns:
                    raise WrongAnswer(f"{who} returned the column {name!r}, which its `columns` does not name")
                values = values.detach().double()
                seen = torch.stack([values.nansum(), (~values.isnan()).double().sum()])
                self.columns[name] = self.columns.get(name, 0) + seen
        return loss.detach(), torch.autograd.grad(loss, logps)[0]

    def _reference(self, batch: Batch) -> Tensor:
        if not self.needs_reference:
            return torch.zeros(len(batch.tokens), dtype=torch.float64)
        if self.reference is None:
            raise PlaitError(
                f"loss={self.name} compares with the weights at the start of a run, which are not known here: take a "
                "checkpoint of the run, or a loss without a reference, or set `applied.loss.reference` in a loop of "
                "your own"
            ).at("loss", self.name)
        known: Tensor = self.reference[batch.texts]
        if not is_planning() and not known.isfinite().all():
            raise PlaitError(
                f"loss={self.name} has no log-probability of the weights at the start for some of these rows: a run "
                "computes them once, for its own number of steps; start a new one by checkpoint.init_from"
            ).at("train.steps", fits="the number with which the run began")
        return known

    def _check_rows(self, batch: Batch) -> None:
        if batch.marks is None or batch.texts is None:
            raise PlaitError(
                f"loss={self.name} learns from {self.made.learns}, but the data have none in their batches: take "
                "data=pairs"
            ).at("data", fits="pairs")
        if len(batch.tokens) % self.group:
            raise PlaitError(
                f"loss={self.name} takes {self.group} rows together, but a micro-batch has {len(batch.tokens)}: set "
                f"train.local_batch_size to a multiple of {self.group}"
            ).at("train.local_batch_size", len(batch.tokens), fits=f"a multiple of {self.group}")


def _real(batch: Batch) -> Tensor:
    """(n,) on the CPU: the rows that are texts. While a model is trained, all are."""
    rows = torch.arange(len(batch.tokens))
    if batch.texts is None or torch.is_grad_enabled() or is_planning():
        return rows
    return rows[batch.texts != NO_TEXT]


def check_loss(config: Config) -> None:
    """Raises PlaitError for a loss that cannot be created, or not be computed as the config asks."""
    name, made = made_loss(config.loss.function)
    if hasattr(made, "of_sequences") and config.loss.chunks > 1:
        raise PlaitError(
            f"loss.chunks={config.loss.chunks} computes the loss before a row is complete, and loss={name} is one of "
            "whole rows; use 1"
        ).at("loss.chunks", config.loss.chunks, fits=(1,))


def loss_of(config: Config, mesh: "Mesh", compiler: Compiler) -> Any:
    """A `PluginLoss`, or a `SequenceLoss`, of the node `loss.function`."""
    name, made = made_loss(config.loss.function)
    sequences = hasattr(made, "of_sequences")
    return SequenceLoss(name, made, mesh, config) if sequences else PluginLoss(name, made, compiler)


def check_learns(config: Config, source: Any) -> None:
    """Raises PlaitError if the loss does not learn from what `source` gives, or a micro-batch would cut its groups."""
    function, gives = config.loss.function, getattr(source, "gives", "")
    name, made = made_loss(function) if function else ("", None)
    learns = getattr(made, "learns", "")
    if learns and not gives:
        raise PlaitError(f"loss={name} learns from {learns}, but the data give none: take data=pairs").at(
            "data", fits="pairs"
        )
    if learns != gives:
        fits = [each for each in installed("loss") if getattr(load(each, "loss"), "learns", "") == gives]
        raise PlaitError(
            f"the data give {gives}, but {f'loss={name}' if name else 'cross-entropy'} learns from "
            f"{learns or 'all answers alike'}: take loss={' or '.join(fits)}"
        ).at("loss", name or None, fits=fits)
    group, rows = rows_together(config), config.train.local_batch_size
    if rows % group:
        raise PlaitError(
            f"loss={name} takes {group} rows together, and train.local_batch_size={rows} would part them: take a "
            f"multiple of {group}"
        ).at("train.local_batch_size", rows, fits=f"a multiple of {group}")


def rows_together(config: Config) -> int:
    """Of how many rows a micro-batch has a multiple, so that the loss gets the rows of a group together."""
    return int(getattr(made_loss(config.loss.function)[1], "group", 1)) if config.loss.function else 1
