"""Runs the micro-batches of a step through the stages, in the order of a schedule of torch's."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait import ModelSpec, PlaitError, stream_into
from plait_pipeline.cut import stages_of
from plait_pipeline.fits import KEY
from plait_pipeline.options import SCHEDULES, PipelineOptions
from plait_pipeline.order import torch_class, torch_name
from plait_pipeline.stage import Stage

LossOf = Callable[[int, Tensor], Tensor]


class Feed(nn.Module):
    """A stage as torch's schedules call it: with what it received, and the number of the micro-batch.

    inputs: of each micro-batch the model's arguments. loss: of the last stage, which returns its result.
    """

    def __init__(self, part: nn.Module, is_first: bool, is_last: bool, like: Tensor) -> None:
        super().__init__()
        self.part, self.is_first, self.is_last, self.like = part, is_first, is_last, like
        self.inputs: list[tuple[Any, ...]] = []
        self.loss: LossOf | None = None

    def forward(self, *received: Tensor, turn: Tensor) -> Tensor:
        i = int(turn)
        stream = {} if self.is_first else {"stream": received[0]}
        result = self.part(*self.inputs[i], **stream)
        if self.is_last:
            assert self.loss is not None
            return self.loss(i, result).to(_loss_dtype(self.like))
        if result.shape != self.like.shape or result.dtype != self.like.dtype:
            raise PlaitError(
                f"a stage returned a stream of {tuple(result.shape)} {result.dtype}, but {tuple(self.like.shape)} "
                f"{self.like.dtype} entered the first block: with {KEY} every block returns what it gets"
            )
        return result.contiguous()


class Steps:
    """The steps of one run on this rank. axis: 1-D DeviceMesh of the ranks that divide the layers."""

    def __init__(self, options: PipelineOptions, axis: Any, spec: ModelSpec) -> None:
        self._options, self._axis, self._spec = options, axis, spec
        self._group, self._rank = axis.get_group(), axis.get_local_rank()
        self._own = stages_of(self._rank, options)
        self._count = options.degree * options.per_rank
        self._ranks = {number: rank for rank in range(options.degree) for number in stages_of(rank, options)}
        self._likes: dict[Any, Tensor] = {}
        self._made: dict[Any, tuple[Any, list[Feed]]] = {}

    def run(self, parts: list[nn.Module], inputs: list[tuple[Any, ...]], loss: LossOf) -> None:
        """All micro-batches, forward and, if gradients are on, backward."""
        shapes = [tuple(x.shape for x in each if isinstance(x, Tensor)) for each in inputs]
        if any(shape != shapes[0] for shape in shapes):
            raise PlaitError(
                f"with {KEY} the micro-batches of a step have one shape, but there are {sorted(set(shapes))}"
            )
        like = self._like(parts, inputs[0], shapes[0])
        if torch.is_grad_enabled():
            self._train(parts, inputs, loss, like, (len(inputs), shapes[0]))
        else:
            self._forward(parts, inputs, loss, like)

    def _like(self, parts: list[nn.Module], inputs: tuple[Any, ...], key: Any) -> Tensor:
        """A tensor on meta of the stream's shape and dtype, which the first stage tells all others once."""
        if key not in self._likes:
            told: list[Any] = [None]
            if self._rank == 0:
                device = self._device()
                with torch.random.fork_rng([device] if device.type != "cpu" else []):
                    stream = stream_into(parts[0], self._spec, *inputs)
                told = [(stream.shape, stream.dtype)]
            dist.broadcast_object_list(told, dist.get_global_rank(self._group, 0), self._group)
            self._likes[key] = torch.empty(told[0][0], dtype=told[0][1], device="meta", requires_grad=True)
        return self._likes[key]

    def _train(self, parts: list[nn.Module], inputs: list[Any], loss: LossOf, like: Tensor, key: Any) -> None:
        if key not in self._made:
            self._made[key] = self._schedule(parts, like, len(inputs))
        schedule, feeds = self._made[key]
        turns = torch.arange(len(inputs))  # on the CPU, so that reading a number waits for nothing
        for feed in feeds:
            feed.inputs, feed.loss = inputs, loss
        try:
            first = (turns,) if self._own[0] == 0 else ()
            schedule.step(*first, target=turns, return_outputs=False, turn=turns)
        except RuntimeError as error:  # torch wraps those of forward
            if (refusal := _refusal(error)) is None:
                raise
            raise refusal from error
        finally:
            for feed in feeds:
                feed.inputs, feed.loss = [], None

    def _schedule(self, parts: list[nn.Module], like: Tensor, count: int) -> tuple[Any, list[Feed]]:
        options = self._options
        chosen = SCHEDULES[options.schedule]
        feeds, stages = [], []
        for number, part in zip(self._own, parts, strict=True):
            is_last = number == self._count - 1
            feed = Feed(part, number == 0, is_last, like)
            given = (torch.empty(1, dtype=torch.int64),) if number == 0 else (like,)
            result = torch.empty((), dtype=_loss_dtype(like), device="meta", requires_grad=True) if is_last else like
            stages.append(
                Stage(
                    feed, number, self._count, self._device(), input_args=given, output_args=result, group=self._group
                )
            )
            feeds.append(feed)
        made = torch_class(torch_name(options, count))
        run = stages if chosen.several else stages[0]
        # Gradients are plain sums: the loss is divided by the tokens of the whole step.
        return made(run, count, loss_fn=lambda result, target: result, scale_grads=False), feeds

    def _forward(self, parts: list[nn.Module], inputs: list[Any], loss: LossOf, like: Tensor) -> None:
        """Stage after stage; of each all micro-batches."""
        sent: list[Any] = []
        here: dict[tuple[int, int], Tensor] = {}  # passed from one stage of this rank to its next
        for number, part in zip(self._own, parts, strict=True):
            for i, each in enumerate(inputs):
                if number == 0:
                    result = part(*each)
                elif (number, i) in here:
                    result = part(*each, stream=here.pop((number, i)))
                else:
                    result = part(*each, stream=self._received(like, number - 1))
                if number == self._count - 1:
                    loss(i, result)
                elif self._ranks[number + 1] == self._rank:
                    here[number + 1, i] = result
                else:
                    result = result.contiguous()
                    sent.append((result, dist.isend(result, self._peer(number + 1), self._group)))
        for _, work in sent:
            work.wait()

    def _received(self, like: Tensor, number: int) -> Tensor:
        x = torch.empty(like.shape, dtype=like.dtype, device=self._device())
        dist.recv(x, self._peer(number), self._group)
        return x

    def _peer(self, number: int) -> int:
        """The rank with stage `number`."""
        return dist.get_global_rank(self._group, self._ranks[number])

    def _device(self) -> torch.device:
        kind = self._axis.device_type
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def _loss_dtype(like: Tensor) -> torch.dtype:
    """What torch is told of the last stage's result."""
    return torch.promote_types(like.dtype, torch.float32)


def _refusal(error: BaseException | None) -> PlaitError | None:
    """The PlaitError that caused `error`."""
    while error is not None and not isinstance(error, PlaitError):
        error = error.__cause__
    return error
