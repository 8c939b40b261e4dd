"""`transform_param`: how a strategy changes what a module sees of a parameter without touching what is stored.

Needs `nn.Module._parameters`, read in every forward, in torch 2.11 to 2.15. Test: tests/parallel/test_transform.py.
"""

import inspect
from collections.abc import Callable
from typing import Any, cast

import attrs
from torch import Tensor, nn

Transform = Callable[[Tensor], Tensor]


def transform_param(module: nn.Module, name: str, fn: Transform) -> None:
    """In the forward of `module`, `module.<name>` reads as `fn(parameter)`. So it does in its other methods that get a
    tensor, for models that call `module.map(x)`, unless their names begin with _, init or reset. Nowhere else.

    Transforms of one parameter nest: a later one is nearer to storage, so it is applied first. Storage, FQN, the
    optimizer and `state_dict` see the parameter itself. Gradients flow back through `fn`. Raises AttributeError if
    `module` has no parameter of that name, and RuntimeError if its forward was already compiled or wrapped, and so
    would not see the transform: use it in the phases "model" and "graph".
    """
    if name not in module._parameters:
        raise AttributeError(f"{type(module).__name__} has no parameter {name!r} of its own")
    transformed = cast(Any, module)
    if "forward" in module.__dict__:
        raise RuntimeError(
            f"{type(module).__name__}.forward was compiled or wrapped before transform_param({name!r}) was set"
        )
    if not isinstance(module, Transformed):
        module.__dict__["_transforms"] = Transforms({})
    of = transformed._transforms.of
    if name not in of:
        transformed.__class__ = _with_property(type(module), name)
    of[name] = (fn, *of.get(name, ()))


@attrs.define(slots=False)
class Transforms:
    """Those of one module, by the parameter's name, the one nearest to storage first. on: whether its forward runs.

    `on` is here because a module looks for parameters of that name before it sets an attribute: that took 6% of the
    host's time of a step.
    """

    of: dict[str, tuple[Transform, ...]]
    on: bool = False


class Transformed:
    """Marks a module whose class was swapped by `transform_param`."""

    _transforms: Transforms


# One class per (class, names), so that compiled code and pickles of equal modules agree; holds nothing of a run.
_classes: dict[tuple[type, frozenset[str]], type] = {}


def _transformed_class(cls: Any) -> type:
    none = frozenset[str]()
    if (cls, none) not in _classes:
        body = {n: _transforming(method, n == "forward") for n, method in _methods(cls).items()}
        bases = (cls,) if issubclass(cls, Transformed) else (Transformed, cls)
        _classes[cls, none] = type(cls.__name__, bases, body | _names(cls, none))
    return _classes[cls, none]


def _names(cls: Any, names: frozenset[str]) -> dict[str, Any]:
    return {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_transformed": (cls, names)}


def _methods(cls: Any) -> dict[str, Any]:
    """The forward of `cls`, and its own methods that others may call to compute, by name."""
    names = {n for base in cls.__mro__[: cls.__mro__.index(nn.Module)] for n in vars(base)} - {*dir(nn.Module)}
    methods = {n: inspect.getattr_static(cls, n) for n in names if not n.startswith(("_", "init", "reset"))}
    return {n: f for n, f in methods.items() if inspect.isfunction(f)} | {"forward": cls.forward}


def _transforming(method: Any, always: bool) -> Any:
    """always: also if no argument is a tensor. A method without one may write to parameters, so sees what is stored."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        transforms = self._transforms
        before = transforms.on
        transforms.on = before or always or any(isinstance(x, Tensor) for x in (*args, *kwargs.values()))
        try:
            return method(self, *args, **kwargs)
        finally:
            transforms.on = before

    call.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return call


def _with_property(cls: Any, name: str) -> type:
    # What was mixed in after transforms stays: to those that come now its class is a plain one.
    plain, names = vars(cls).get("_transformed", (cls, frozenset()))
    names |= {name}
    if (plain, names) not in _classes:
        properties = {n: _property(n) for n in names}
        _classes[plain, names] = type(plain.__name__, (_transformed_class(plain),), properties | _names(plain, names))
    return _classes[plain, names]


def _property(name: str) -> property:
    def get(self: Any) -> Tensor | None:
        param = self._parameters[name]
        transforms = self._transforms
        if transforms.on:
            for fn in transforms.of[name]:
                param = fn(param)
        return param

    return property(get)
