"""`mix_in`: how a strategy, or the core, gives one module a forward of its own."""

import functools
from typing import Any

from torch import nn


def mix_in(module: nn.Module, mixin: type) -> None:
    """Put `mixin` before the class of this one module, whose name it keeps; `super()` in `mixin` is that class."""
    one: Any = module
    one.__class__ = _mixed(mixin, one.__class__)


@functools.cache  # one class per pair, so that equal modules stay equal to a compiler
def _mixed(mixin: Any, cls: Any) -> Any:
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
