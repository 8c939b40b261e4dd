"""`transform_param`: how a strategy changes what a module sees of a parameter without touching what is stored."""

import inspect
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

Transform = Callable[[Tensor], Tensor]


def transform_param(module: nn.Module, name: str, fn: Transform) -> None:
    """Inside `module`'s own forward, and only there, `module.<name>` is `fn(parameter)`.

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
        transformed.__class__ = _transformed_class(type(module))
        module.__dict__["_transforms"] = {}
        module.__dict__["_transforms_on"] = False
    if name not in transformed._transforms:
        transformed.__class__ = _with_property(type(module), name)
        transformed._transforms[name] = ()
    transformed._transforms[name] = (*transformed._transforms[name], fn)


class Transformed:
    """Marks a module whose class was swapped by `transform_param`."""

    _transforms: dict[str, tuple[Transform, ...]]
    _transforms_on: bool


# One class per (class, names), so that compiled code and pickles of equal modules agree; holds nothing of a run.
_classes: dict[tuple[type, frozenset[str]], type] = {}


def _transformed_class(cls: Any) -> type:
    key = (cls, frozenset[str]())
    if key not in _classes:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            before, self._transforms_on = self._transforms_on, True
            try:
                return cls.forward(self, *args, **kwargs)
            finally:
                self._transforms_on = before

        forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
        body = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "_plain": cls}
        _classes[key] = type(cls.__name__, (Transformed, cls), body | {"_names": frozenset[str]()})
    return _classes[key]


def _with_property(cls: Any, name: str) -> type:
    names = cls._names | {name}
    key = (cls._plain, names)
    if key not in _classes:
        bases = (_transformed_class(cls._plain),)
        body = {n: _property(n) for n in names} | {
            "_names": names,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        _classes[key] = type(cls.__name__, bases, body)
    return _classes[key]


def _property(name: str) -> property:
    def get(self: Any) -> Tensor | None:
        param = self._parameters[name]
        if self._transforms_on:
            for fn in reversed(self._transforms[name]):
                param = fn(param)
        return param

    return property(get)
