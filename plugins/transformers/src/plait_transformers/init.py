"""How a family initialises its parameters, by recording what its own `_init_weights` does to each.

The functions compare by value and can be pickled.
"""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode

from plait import PlaitError
from plait.ops import Constant, Normal, TruncNormal, ZeroRow, zeros
from plait_transformers.balance import BUFFERS, Balanced
from plait_transformers.made import Drawing, Drawn, Made

Fill = Callable[..., Any]


@attrs.frozen
class Computed:
    """What is computed from the configuration, such as the frequencies of RoPE."""

    value: Tensor = attrs.field(eq=attrs.cmp_using(eq=torch.equal))

    def __call__(self, tensor: Tensor, generator: Generator | None = None, row: int | None = None) -> Tensor:
        return tensor.copy_(self.value if row is None else self.value[row])


@attrs.frozen
class Uniform:
    """Draws evenly between `low` and `high`."""

    low: float
    high: float

    def __call__(self, tensor: Tensor, generator: Generator | None = None) -> Tensor:
        return tensor.uniform_(self.low, self.high, generator=generator)


def recorded(model: Any) -> dict[str, Fill]:
    """FQN -> how `model`, on any device, fills that parameter or buffer. Values are not changed."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    recorder = _Recorder({id(tensor): fqn for fqn, tensor in named.items()})
    owner = dict[nn.Module, Any]()  # the innermost model that a module is part of, as transformers asks
    for inner in model.modules():
        if hasattr(inner, "_init_weights"):
            owner |= dict.fromkeys(inner.modules(), inner)
    with torch.no_grad(), recorder, torch.device("cpu"):
        for module in reversed(list(model.modules())):  # as transformers does: a parent after its children
            owner[module]._init_weights(module)
    for fqn in [fqn for fqn in named if fqn not in recorder.fills]:
        if (constant := _of_constructor(model, fqn)) is not None:
            recorder.fills[fqn] = constant
    for fqn, module in model.named_modules():
        if isinstance(module, Balanced):
            recorder.fills |= {f"{fqn}.{name}": zeros for name in BUFFERS}
    missing = [fqn for fqn in named if fqn not in recorder.fills]
    if missing:
        kind = model.config.model_type
        raise PlaitError(
            f"how {kind} initialises {missing[0]!r} is not known: its `_init_weights` does not fill it in a way that "
            "can be repeated row by row"
        )
    return recorder.fills


def _of_constructor(model: Any, fqn: str) -> Fill | None:
    """What the constructor of a module without arguments, such as an activation with a slope, gave to `fqn`; None if
    the module has got other numbers, or values that are drawn."""
    owner, _, name = fqn.rpartition(".")
    module = model.get_submodule(owner)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            made, again = type(module)(), type(module)()
    except TypeError:  # it needs arguments
        return None
    value, other = getattr(made, name, None), getattr(again, name, None)
    if _numbers(made) != _numbers(module) or not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return None
    if value.shape != getattr(module, name).shape or not torch.equal(value, other):
        return None
    return Computed(value.detach().clone())


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in (int, float) and name != "training"}


def _normal(tensor: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Fill | None:
    return Normal(float(std)) if not mean else None


def _trunc(tensor: Any, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, **_: Any) -> Fill | None:
    return TruncNormal(float(std), cut=b / std) if not mean and a == -b else None


def _uniform(tensor: Any, a: float = 0.0, b: float = 1.0, generator: Any = None) -> Fill | None:
    return Uniform(float(a), float(b))


def _kaiming(tensor: Any, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu", **_: Any) -> Fill:
    fan = tensor[0].numel() if mode == "fan_in" else tensor.numel() // tensor.shape[1]
    bound = nn.init.calculate_gain(nonlinearity, a) * (3 / fan) ** 0.5
    return Uniform(-bound, bound)


def _fill(tensor: Any, value: Any = 0.0) -> Fill | None:
    return Constant(float(value))


def _constant(tensor: Any, val: Any = 0.0) -> Fill | None:
    return Constant(float(val))


def _ones(tensor: Any) -> Fill | None:
    return Constant(1.0)


def _copy(tensor: Any, other: Any, *args: Any, **_: Any) -> Fill | None:
    return Computed(other.detach().clone()) if isinstance(other, Tensor) and not other.is_meta else None


FILLS: dict[Any, Callable[..., Fill | None]] = {
    **{nn.init.normal_: _normal, Tensor.normal_: _normal, nn.init.trunc_normal_: _trunc},
    **{nn.init.kaiming_uniform_: _kaiming},
    **{nn.init.uniform_: _uniform, Tensor.uniform_: _uniform, nn.init.constant_: _constant, nn.init.ones_: _ones},
    **{nn.init.zeros_: _fill, Tensor.zero_: _fill, Tensor.fill_: _fill, Tensor.copy_: _copy},
}


class _Recorder(TorchFunctionMode):
    """Inside, what would fill a tensor of `names` (id -> FQN) is noted and not done."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.fills: dict[str, Any] = {}
        self._views: dict[int, tuple[str, int]] = {}
        self._alive: list[Any] = []
        self._drawing = Drawing()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        known = self.names.get(id(target)) if isinstance(target, Tensor) else None
        if func in FILLS and isinstance(target, Tensor) and (known is not None or id(target) in self._views):
            if known is not None:
                self._note(known, self._made(target, args[1:]) or FILLS[func](*args, **kwargs))
                self._keep(target, known)
            else:
                fqn, index = self._views[id(target)]
                zero = FILLS[func](*args, **kwargs) == Constant(0.0)
                self._note(fqn, ZeroRow(self.fills[fqn], index) if zero and fqn in self.fills else None)
            return target
        result = func(*args, **kwargs)
        self._drawing.note(func, args, kwargs, result)
        if known is not None and isinstance(result, Tensor):
            if result is target:  # changed in place, such as scaled
                self._note(known, self._made(target, (result,)))
            self._alive.append(result)  # so that no other tensor gets its id
            if func is Tensor.__getitem__ and isinstance(args[1], int):
                self._views[id(result)] = (known, args[1])
                self._drawing.forget(result)
            elif func is Tensor.data.__get__:  # type: ignore[attr-defined] # torch types a property as its value
                self.names[id(result)] = known
        return result

    def _made(self, target: Tensor, values: tuple[Any, ...]) -> Fill | None:
        """What fills `target` with values that were drawn, if these are: whole, or row by row of what was filled."""
        drawn = self._drawing.of(values[0]) if values else None
        if drawn is None or not (drawn.is_random() or values[0].is_meta):
            return None
        if target.dim() < 2 or drawn.by_rows():
            return Made(drawn)
        return None if drawn.is_random() else Computed(drawn.value(torch.empty(target.shape), None))

    def _keep(self, target: Tensor, fqn: str) -> None:
        if (fill := self.fills.get(fqn)) is not None:
            self._drawing.put(target, Drawn(fill=fill))

    def _note(self, fqn: str, fill: Fill | None) -> None:
        self.fills.pop(fqn, None)
        if fill is not None:
            self.fills[fqn] = fill


def patterns(fills: dict[str, Fill], pattern_of: Callable[[str], str]) -> dict[str, Fill]:
    """The same by pattern, where all tensors of a pattern are filled alike; others by their own name, first."""
    groups: dict[str, list[str]] = {}
    for fqn in fills:
        groups.setdefault(pattern_of(fqn), []).append(fqn)
    return dict(_entries(fills, groups, single=True)) | dict(_entries(fills, groups, single=False))


def _entries(fills: dict[str, Fill], groups: dict[str, list[str]], single: bool) -> Iterator[tuple[str, Fill]]:
    for pattern, names in groups.items():
        alike = all(fills[name] == fills[names[0]] for name in names)
        if alike and not single:
            yield pattern, fills[names[0]]
        elif not alike and single:
            yield from ((name, fills[name]) for name in names)
