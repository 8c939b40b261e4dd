"""Cuts a model into stages. Each stage runs the model's own forward, in which the blocks of other stages are absent.

So everything that a forward does beside its blocks (scaled embeddings, rotations, masks) is done on every stage that
needs it, by the model's own code. A module that is absent has its name, no parameters, and one of these roles:

    before the stage   modules of `ModelSpec.before` return a placeholder of the stream's shape, which nobody reads;
                       blocks pass it on, and the last of these blocks returns the stream that was received
    after the stage    the first block takes the stream and ends the forward: the rest is the business of other stages
"""

import copy
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plait.contract.errors import PlaitError
from plait.contract.model_spec import ModelSpec
from plait.parallel.mix_in import mix_in
from plait.system.torch_internals.modules import children_of


def stage(model: nn.Module, spec: ModelSpec, first: int, last: int) -> nn.Module:
    """The part of `model` with its blocks `first` to `last - 1`, with what stands before them if `first` is 0, and with
    what stands after them if `last` is their number.

    Of the first stage call `part(*inputs)`, of the others `part(*inputs, stream=x)`, with x the result of the stage
    before. The last returns what the model returns; the others the stream, a tensor. The inputs are always the model's.
    Names are those of the model. Blocks, and modules of `before` and `after`, are moved, not copied: use each of them
    in one stage only, and `model` no more.
    Raises PlaitError for blocks that the model does not have, or if it cannot be cut.
    """
    blocks = list(spec.blocks_of(model))
    if not 0 <= first < last <= len(blocks):
        raise PlaitError(f"a stage of the blocks {first} to {last - 1} cannot be cut: the model has {len(blocks)}")
    check_stages(model, spec)
    now = Passing(first == 0, last == len(blocks))
    roles: dict[str, Any] = {
        fqn: Pass if i < first else FirstAfter if i == last else Later for i, fqn in enumerate(blocks)
    }
    roles |= dict.fromkeys(spec.before_of(model), Empty) | dict.fromkeys(spec.after_of(model), Later)
    if first:
        roles[blocks[first - 1]] = Received
    own = set(blocks[first:last])
    own |= set(spec.before_of(model)) if now.first else set()
    own |= set(spec.after_of(model)) if now.last else set()
    names = {module: fqn for fqn, module in model.named_modules() if fqn in roles}
    made: dict[nn.Module, nn.Module] = {m: m if fqn in own else roles[fqn](m, fqn, now) for m, fqn in names.items()}
    part = _copied(model, made)
    mix_in(part, StageMethods)
    part.__dict__["_passing"] = now
    return part


def check_stages(model: nn.Module, spec: ModelSpec, why: str = "the model is cut into stages") -> None:
    """Raises PlaitError if `model` cannot be cut between any two blocks: if parameters belong to no stage, or to two.

    why: the start of the sentence.
    """
    blocks = spec.blocks_of(model)
    end = dict.fromkeys(spec.before_of(model), "the modules before the blocks")
    end |= dict.fromkeys(spec.after_of(model), "those after the blocks") | {fqn: fqn for fqn in blocks}
    seen: dict[int, tuple[str, str]] = {}
    for fqn, param in model.named_parameters(remove_duplicate=False):
        owner = next((end[e] for e in end if fqn.startswith(f"{e}.")), None)
        if owner is None:
            raise PlaitError(
                f"{why}, but {fqn!r} is in no block, and the model's spec does not name its module in `before` or "
                "`after`"
            )
        other, where = seen.setdefault(id(param), (fqn, owner))
        if where != owner:
            raise PlaitError(
                f"{why}, but {other!r} and {fqn!r} are one tied weight, which would be on two stages; do not "
                "divide the layers, or untie it by an option of the model, which cannot load tied weights then"
            )


def stream_into(part: nn.Module, spec: ModelSpec, *inputs: Any) -> Tensor:
    """What enters the first block of `part`, a first stage, for these inputs of the model, without running a block.

    Between all stages the stream has this shape and dtype. Collective over the ranks that share the stage.
    """

    def leave(block: nn.Module, args: Any, kwargs: Any) -> None:
        raise Left(_stream(args, kwargs))

    block = next(iter(spec.blocks_of(part).values()))
    handle = block.register_forward_pre_hook(leave, prepend=True, with_kwargs=True)
    try:
        with torch.no_grad():
            return part(*inputs)
    finally:
        handle.remove()


@attrs.define
class Passing:
    """first, last: which stage it is. stream: what it got, during its forward. entered: whether its blocks have it."""

    first: bool
    last: bool
    stream: Tensor | None = None
    entered: bool = False


class Left(Exception):
    """Ends the forward of a stage. Its argument is the stream that the stage returns."""


class StageMethods:
    """Mixed into the class of a part of a model."""

    _passing: Passing

    def forward(self, *inputs: Any, stream: Tensor | None = None, **named: Any) -> Any:
        plain: Any = super()
        now = self._passing
        if (stream is None) != now.first:
            raise PlaitError("a first stage takes no stream" if now.first else "this stage needs the stream before it")
        now.stream, now.entered = stream, now.first
        try:
            result = plain.forward(*inputs, **named)
        except Left as left:
            (result,) = left.args
            if not isinstance(result, Tensor) or isinstance(result, DTensor):
                kind = type(result).__name__
                raise PlaitError(
                    f"a block got a {kind} as its first argument: between stages the stream is a plain tensor"
                ) from None
        finally:
            now.stream = None
        if not now.entered:
            raise PlaitError("the model called none of the blocks before this stage, so the stream did not enter it")
        return result


class Absent(nn.Module):
    """A module of another stage, with what the model may ask it for, such as its kind. absent: `ModelSpec` leaves it
    out."""

    absent = True

    def __init__(self, module: nn.Module, fqn: str, now: Passing) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(module).items() if isinstance(value, str | int | float)}
        self.__dict__ |= plain | {"_fqn": fqn, "_now": now}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        now: Any = self._now
        return self.act(now, args, kwargs)

    def act(self, now: Passing, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class Empty(Absent):
    """Before the blocks: a placeholder."""

    def act(self, now: Passing, args: Any, kwargs: Any) -> Any:
        assert now.stream is not None
        return torch.zeros_like(now.stream)


class Pass(Absent):
    """A block before the stage."""

    def act(self, now: Passing, args: Any, kwargs: Any) -> Any:
        return _stream(args, kwargs)


class Received(Absent):
    """The last block before the stage."""

    def act(self, now: Passing, args: Any, kwargs: Any) -> Any:
        if now.entered:
            raise PlaitError(
                f"the model calls the block {self._fqn!r} twice in one forward; stages need each block once, in order"
            )
        now.entered = True
        return now.stream


class FirstAfter(Absent):
    """The first block after the stage."""

    def act(self, now: Passing, args: Any, kwargs: Any) -> Any:
        if not now.entered:
            return Later.act(self, now, args, kwargs)  # type: ignore[arg-type]
        stream = _stream(args, kwargs)
        for other in (*args, *kwargs.values()):
            alike = isinstance(other, Tensor) and other.is_floating_point() and other.shape == stream.shape
            if alike and other is not stream:
                raise PlaitError(
                    f"the block {self._fqn!r} gets the stream and a second tensor of its shape, {tuple(other.shape)}, "
                    "which later stages would not have: one stream passes from stage to stage"
                )
        raise Left(stream)


class Later(Absent):
    """What stands after that."""

    def act(self, now: Passing, args: Any, kwargs: Any) -> Any:
        raise PlaitError(
            f"the model calls {self._fqn!r} before the blocks that stand before it; stages need them in order"
        )


def _stream(args: Any, kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _copied(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy of the tree of modules below `module`, with what `made` says instead of its keys."""
    if module not in made:
        new: Any = object.__new__(type(module))
        # Tables of children, buffers and hooks are the copy's own; what they hold, such as meshes, is not copied.
        new.__dict__.update({k: copy.copy(v) if isinstance(v, dict | set) else v for k, v in vars(module).items()})
        made[module] = new
        for name, child in children_of(module).items():
            children_of(new)[name] = None if child is None else _copied(child, made)
    return made[module]
