"""What a user gives so that parallel code of any framework is compared with one process: no Plait model or spec."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from plait import PlaitError, misfit

QUESTIONS = {  # key of `off` -> what is asked
    "norm": "norm, and gradients after clipping",
    "steps": "parameters after the optimizer's steps",
    "saved": "saved and loaded, then a step",
    "unequal": "gradients, unequal token counts",
    "accumulation": "gradients, micro-batches",
    "documents": "gradients, packed documents",
    "recomputation": "gradients, recomputation",
    "frozen": "gradients, frozen parameters",
}
DATA = ("dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard")  # how axes that split the batch usually begin
DTYPES = ("float64", "float32", "bfloat16")


class Share(dict[str, Tensor]):
    """The rows that one call of the loss gets, by the batch's keys: `model(**batch)` works.

    total: labels of the whole batch that count, of all ranks and micro-batches. ranks: how many data ranks there are.
    parts: into how many micro-batches each divides its rows.
    """

    def __init__(self, tensors: Mapping[str, Tensor], total: float, ranks: int = 1, parts: int = 1) -> None:
        super().__init__(tensors)
        self.total, self.ranks, self.parts = total, ranks, parts


@attrs.define
class Parallel:
    """A parallel model, and what its framework does in its own way. What is None is done as plain torch does it.

    model:     what the loss is called with.
    optimizer: has `step` and `zero_grad`. None: `Comparison.optimizer` makes one of the model's parameters.
    backward:  gets a loss. None: `loss.backward()`.
    run:       gets the Shares of a step, does forward and backward of all, and returns this rank's loss, or None if it
               has none: for pipelines, and frameworks that accumulate themselves. None: `loss` and `backward` of each.
    clip:      gets the largest norm; clips, and returns the norm. None: `model.clip_grad_norm_` if it has one, else
               torch's `clip_grad_norm_`.
    values, gradients: return whole tensors by the names that they have in one process. None: they are gathered from
               plain parameters, DTensors and FSDP1's flat parameters. A gradient may be None. With `gradients` give
               `clip` too, or switch that question off.
    fill:      gets whole values by name, and writes the parameters.
    save, load: get a folder. None: torch's distributed checkpoints of the model and the optimizer.
    names:     a parameter's name -> its name in one process. None: prefixes of torch's wrappers are cut.
    shards:    pattern of names -> (dim, axis), for plain tensors of which each rank along `axis` holds an equal part.
    """

    model: nn.Module
    optimizer: Any = None
    backward: Callable[[Tensor], Any] | None = None
    run: Callable[[Sequence["Share"]], Any] | None = None
    clip: Callable[[float], Any] | None = None
    values: Callable[[], Mapping[str, Tensor]] | None = None
    gradients: Callable[[], Mapping[str, Tensor | None]] | None = None
    fill: Callable[[Mapping[str, Tensor]], Any] | None = None
    save: Callable[[str], Any] | None = None
    load: Callable[[str], Any] | None = None
    names: Callable[[str], str] | None = None
    shards: Mapping[str, tuple[int, str]] = attrs.Factory(dict)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _of_transformers(model: Any, batch: Share) -> Tensor:
    """Its own, divided by the labels of all, times the ranks over which gradients are averaged."""
    loss: Tensor = model(**batch, num_items_in_batch=batch.total / batch.ranks).loss
    return loss


@attrs.frozen(kw_only=True)
class Comparison:
    """Parallel code that is compared with one process.

    build:       () -> the model, in one process. Random values need no seed.
    parallelize: (model, DeviceMesh) -> the parallel model, or a `Parallel`. The model has the values of one process; it
                 may be changed in place, or another one returned.
    batch:       step -> the whole batch: tensors with the rows in dim 0, by name. `random_tokens` makes one.
    loss:        (model, Share) -> what backward is called on. In one process the Share is the whole batch. None: that
                 of causal models of transformers, over all labels.
    mesh:        name of each axis -> its ranks, outermost first.
    data:        axes whose ranks get different rows. None: those named like `dp` or `fsdp`.
    losses:      how the losses of data ranks are joined: "mean" if the framework averages gradients, else "sum".
    packed:      step -> a batch of packed documents, with positions from 0 in each. positions: their key.
    optimizer:   parameters -> an optimizer, of both sides. SGD shows the scale of a gradient, which Adam hides.
    max_norm:    to which gradients are clipped. steps: of the optimizer.
    frozen:      names of parameters that do not train in that question. None: the first half.
    recompute:   switches recomputation on in the parallel model. None: transformers' own switch, else torch's
                 `checkpoint` around each module in a ModuleList.
    off:         question -> the reason for not asking it; the questions are in docs/verify-any-code.md.
    dtype:       "float64", "float32" or "bfloat16", of everything.
    rounded:     model -> the model as `parallelize` makes it compute in fewer bits than `dtype`, in fp8 for example.
                 Its results in one process say how far rounding goes. None: `dtype` alone rounds.
    patience:    seconds that ranks have for one question, beside 5 times what one process took for all.
    """

    build: Callable[[], nn.Module]
    parallelize: Callable[[nn.Module, Any], "nn.Module | Parallel"]
    batch: Callable[[int], Mapping[str, Tensor]]
    loss: Callable[[Any, Share], Tensor] = _of_transformers
    mesh: Mapping[str, int] = attrs.field()
    data: tuple[str, ...] | None = None
    losses: str = attrs.field(default="mean")
    packed: Callable[[int], Mapping[str, Tensor]] | None = None
    positions: str = "position_ids"
    optimizer: Callable[[Any], torch.optim.Optimizer] = _sgd
    max_norm: float = 1.0
    steps: int = 3
    frozen: Callable[[str], bool] | None = None
    recompute: Callable[[nn.Module], Any] | None = None
    off: Mapping[str, str] = attrs.field(factory=dict)
    dtype: str = attrs.field(default="float64")
    rounded: Callable[[nn.Module], nn.Module] | None = None
    patience: float = 120.0

    @mesh.validator
    def _ranks(self, _: Any, mesh: Any) -> None:
        fits = "axes with their numbers of ranks, two ranks or more in all, such as {'tp': 2}"
        sizes = mesh.values() if isinstance(mesh, Mapping) else ()
        if not all(type(size) is int and size > 0 for size in sizes) or math.prod(sizes) < 2:
            raise misfit("mesh", mesh, fits)

    @losses.validator
    def _joined(self, _: Any, losses: Any) -> None:
        if losses not in ("mean", "sum"):
            raise misfit("losses", losses, "'mean' or 'sum'")

    @dtype.validator
    def _known(self, _: Any, dtype: Any) -> None:
        if dtype not in DTYPES:
            raise misfit("dtype", dtype, " or ".join(map(repr, DTYPES)))

    @off.validator
    def _reasons(self, _: Any, off: Any) -> None:
        for key, reason in off.items():
            if key not in QUESTIONS:
                known = ", ".join(QUESTIONS)
                raise PlaitError(f"off names {key!r}, which is no question; the questions: {known}").at(
                    f"off.{key}", reason, fits=QUESTIONS
                )
            if not isinstance(reason, str) or not reason.strip():
                raise misfit(f"off.{key}", reason, "the reason for not asking it, in words")

    def __attrs_post_init__(self) -> None:
        if self.rounded is not None and self.dtype == "float64":
            raise misfit("dtype", self.dtype, "'float32' or 'bfloat16', in which a model that is `rounded` computes")
        for axis in self.data or ():
            if axis not in self.mesh:
                raise misfit("data", axis, f"an axis of the mesh: {', '.join(self.mesh)}")

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh.values())

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes whose ranks get different rows."""
        return tuple(axis for axis in self.mesh if axis.startswith(DATA)) if self.data is None else self.data

    @property
    def data_ranks(self) -> int:
        """The number of data ranks."""
        return math.prod(self.mesh[axis] for axis in self.data_axes)

    def place(self, rank: int) -> dict[str, int]:
        """Axis -> the coordinate of `rank`."""
        found = {}
        for axis, size in reversed(list(self.mesh.items())):
            found[axis], rank = rank % size, rank // size
        return {axis: found[axis] for axis in self.mesh}

    def data_rank(self, rank: int) -> int:
        """Which of the data ranks `rank` is."""
        place, index = self.place(rank), 0
        for axis in self.data_axes:
            index = index * self.mesh[axis] + place[axis]
        return index
