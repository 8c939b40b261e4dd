"""`view`: how a strategy changes what a module sees of a parameter without touching what is stored."""

import inspect
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

View = Callable[[Tensor], Tensor]


def view(module: nn.Module, name: str, fn: View) -> None:
    """Inside `module`'s own forward, and only there, `module.<name>` is `fn(parameter)`.

    Views of one parameter nest: a later one sits nearer the storage, so it is applied first. What is stored, its
    FQN, the optimizer and `state_dict` see the parameter itself. Gradients flow back through `fn`.
    Raises AttributeError where `module` has no parameter of that name, and RuntimeError where its forward was
    compiled or wrapped already, and so would not see the view: use it at the stages "model" and "graph".
    """
    if name not in module._parameters:
        raise AttributeError(f"{type(module).__name__} has no parameter {name!r} of its own")
    viewed = cast(Any, module)
    if "forward" in module.__dict__:
        raise RuntimeError(f"{type(module).__name__}.forward was compiled or wrapped before view({name!r}) was set")
    if not isinstance(module, Viewed):
        viewed.__class__ = _viewed_class(type(module))
        module.__dict__["_views"] = {}
        module.__dict__["_views_on"] = False
    if name not in viewed._views:
        viewed.__class__ = _with_property(type(module), name)
        viewed._views[name] = ()
    viewed._views[name] = (*viewed._views[name], fn)


class Viewed:
    """Marks a module whose class was swapped by `view`."""

    _views: dict[str, tuple[View, ...]]
    _views_on: bool


# One class a (class, names), so that compiled code and pickles of equal modules agree; holds nothing of a run.
_classes: dict[tuple[type, frozenset[str]], type] = {}


def _viewed_class(cls: Any) -> type:
    key = (cls, frozenset[str]())
    if key not in _classes:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            before, self._views_on = self._views_on, True
            try:
                return cls.forward(self, *args, **kwargs)
            finally:
                self._views_on = before

        forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
        body = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "_plain": cls}
        _classes[key] = type(cls.__name__, (Viewed, cls), body | {"_names": frozenset[str]()})
    return _classes[key]


def _with_property(cls: Any, name: str) -> type:
    names = cls._names | {name}
    key = (cls._plain, names)
    if key not in _classes:
        bases = (_viewed_class(cls._plain),)
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
        if self._views_on:
            for fn in reversed(self._views[name]):
                param = fn(param)
        return param

    return property(get)
