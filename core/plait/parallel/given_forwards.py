"""Which forwards a module was given besides its class's own, and whether a later one still reaches them."""

import functools
import inspect
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from plait.system.torch_internals.compiler import original

CALLED = ("forward", "__call__")  # what a module is called by


def named(what: Any) -> str:
    """A class or function as a reader finds it: `its.module.Name`."""
    what = inspect.unwrap(getattr(what, "__func__", what)) if callable(what) else what
    what = what if hasattr(what, "__qualname__") else type(what)
    return f"{what.__module__}.{what.__qualname__}"


def own_method(cls: type, below: type, method: str) -> Any:
    """The `method` that `cls` brings to a class `below` that it is put before; None if it brings none."""
    return next((vars(c)[method] for c in cls.__mro__ if c not in below.__mro__ and method in vars(c)), None)


@functools.lru_cache(maxsize=1024)  # a model has many modules of few classes
def forwards_of(cls: Any, method: str = "forward") -> tuple[str, ...]:
    """What gave the class `cls` of a module its `method`, in words, the last first: mix-ins, and transforms of
    parameters."""
    givers = []
    for base in cls.__mro__:
        if "_mixed_in" in vars(base):
            mixin, below = vars(base)["_mixed_in"], base.__mro__[base.__mro__.index(vars(base)["_mixed_in"]) + 1]
            if own_method(mixin, below, method) is not None:
                givers.append(named(mixin))
        elif method == "forward" and "_transformed" in vars(base):
            _, names = vars(base)["_transformed"]
            givers += [f"transform_param({name!r})" for name in sorted(names)]
    return tuple(givers)


def calls_super(method: Any, cls: type, of: str = "forward") -> bool:
    """Whether the code of `method`, or what it calls of its class `cls`, mentions `super` and its method `of`."""
    for function in _functions(method, cls):
        if any({"super", of} <= {*code.co_names} for code in _codes(function.__code__)):
            return True
    return False


def _functions(method: Any, cls: type) -> Iterator[FunctionType]:
    """The Python functions that are in `method`: itself, what it wraps, and the methods of `cls` that it names."""
    left, seen = [method], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        left += _inside(one)
        if isinstance(one, FunctionType):
            yield one
            names = {name for code in _codes(one.__code__) for name in code.co_names}
            left += [vars(c)[name] for c in cls.__mro__[:-1] for name in names if callable(vars(c).get(name))]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def reaches(later: Any, earlier: Any) -> bool:
    """Whether calling `later` may call `earlier`: it holds it, or is made of code that asks for a `forward`."""
    left, seen = [later], set[int]()
    while left:
        one = left.pop()
        if one is earlier or getattr(one, "__func__", one) is getattr(earlier, "__func__", earlier):
            return True
        if id(one) not in seen:
            seen.add(id(one))
            compiled = original(one)
            plain = isinstance(one, FunctionType) and compiled is None
            if plain and {"forward", "super"} & set(one.__code__.co_names):
                return True
            left += _inside(one) if compiled is None else [compiled]
    return False


def _inside(one: Any) -> list[Any]:
    """The callables that `one` is made of."""
    held: list[Any] = []
    if isinstance(one, MethodType | classmethod | staticmethod):
        held.append(one.__func__)
    if isinstance(one, functools.partial | functools.partialmethod):
        held += [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, FunctionType):
        held += [cell for cell in one.__closure__ or () if isinstance(cell, CellType)]
        held += [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
    if isinstance(one, CellType):
        try:
            held.append(one.cell_contents)
        except ValueError:  # not filled yet
            return []
    elif not isinstance(one, type) and hasattr(one, "__dict__"):
        held += [value for value in vars(one).values() if callable(value)]
    cells = [each for each in held if isinstance(each, CellType)]
    return cells + [each for each in held if callable(each) and not isinstance(each, type) and not _is_module(each)]


def _is_module(each: Any) -> bool:
    return hasattr(each, "named_parameters")
