"""What modules are called with, and what they return, in one forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from torch import Tensor, nn

from plait_transformers.attention import Inner


@attrs.frozen
class Call:
    """Of a module: its arguments, the first tensor among them and of its results. streams: how many of its results have
    the shape of what entered."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    entered: Tensor | None
    result: Tensor | None
    streams: int = 1

    def widths(self) -> tuple[int, int]:
        """The last dims of what entered and of the result."""
        assert self.entered is not None
        assert self.result is not None
        return self.entered.shape[-1], self.result.shape[-1]


@attrs.frozen
class Attended:
    """Of an inner attention: shapes of queries, keys and values. masked: it got a mask that the family made."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    masked: bool = False


@attrs.define
class Watch:
    """calls: FQN -> the last call of a module. places: FQN -> when it was called. attended: of inner attentions.
    mixing: branches that mix tokens in a way of their own."""

    tokens: tuple[Tensor, ...] = ()
    calls: dict[str, Call] = attrs.Factory(dict)
    places: dict[str, list[int]] = attrs.Factory(dict)
    block_places: list[int] = attrs.Factory(list)
    attended: dict[str, Attended] = attrs.Factory(dict)
    mixing: list[str] = attrs.Factory(list)


@contextmanager
def watching(model: nn.Module) -> Iterator[Watch]:
    """Notes all calls inside; tensors are kept alive, so that the same storage means the same values."""
    watch, count, hooks = Watch(), [0], []
    lists = [fqn for fqn, m in model.named_modules() if isinstance(m, nn.ModuleList)]

    def note(fqn: str) -> Any:
        def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            count[0] += 1
            watch.places.setdefault(fqn, []).append(count[0])
            if fqn.rpartition(".")[0] in lists and any(True for _ in module.children()):
                watch.block_places.append(count[0])
            entered = first((*args, *kwargs.values()))
            several = [x for x in result if isinstance(x, Tensor)] if isinstance(result, tuple) else []
            streams = sum(entered is not None and x.shape == entered.shape for x in several)
            watch.calls[fqn] = Call(args, kwargs, entered, first(result), streams)
            if isinstance(module, Inner):
                q, k, v = (tuple(x.shape) for x in args[:3])
                watch.attended[fqn] = Attended(q, k, v, args[3] is not None)

        return after

    for fqn, module in model.named_modules():
        if fqn:
            hooks.append(module.register_forward_hook(note(fqn), with_kwargs=True))
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def first(values: Any) -> Tensor | None:
    """`values`, or the first tensor among them."""
    if isinstance(values, Tensor):
        return values
    return next((v for v in values if isinstance(v, Tensor)), None) if isinstance(values, tuple | list) else None


def same(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether both are the same values, perhaps in another shape."""
    return x is not None and y is not None and x.data_ptr() == y.data_ptr() and x.numel() == y.numel()


def proportional(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether both are the same values, perhaps in another shape, or one is a multiple of the other."""
    if x is None or y is None or x.numel() != y.numel() or not x.is_floating_point():
        return False
    if same(x, y):
        return True
    a, b = x.flatten(), y.flatten()
    ratio = float((a @ b) / (b @ b).clamp_min(1e-30))
    return ratio != 0 and float((a - ratio * b).abs().max()) <= 1e-6 * float(a.abs().max())
