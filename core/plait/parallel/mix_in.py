"""`mix_in`: how a strategy, or the core, gives one module a forward of its own."""

import functools
from typing import Any

from torch import nn

from plait.contract.errors import PlaitError
from plait.parallel.given_forwards import CALLED, calls_super, forwards_of, named, own_method


def mix_in(module: nn.Module, mixin: type) -> None:
    """Put `mixin` before the class of this one module, whose name it keeps; `super()` in `mixin` is that class.

    Raises PlaitError if that would undo what came before without a word: if a forward of `mixin` does not call
    `super()`, so that the one that was mixed in before, or the transforms of parameters, would act no more; if the
    module itself has a forward, which hides those of classes; or if `mixin` is there already.
    """
    one: Any = module
    cls, name = one.__class__, one.__class__.__name__
    if mixin in cls.__mro__:
        raise PlaitError(f"{named(mixin)} is mixed into a {name} that has it already: mix it in once")
    for method in CALLED:
        own = own_method(mixin, cls, method)
        if own is None:
            continue
        if method in one.__dict__:
            raise PlaitError(
                f"{named(mixin)} is mixed into a {name} whose own {method} is {named(one.__dict__[method])}, which "
                "hides those of its classes: mix it in before the module is wrapped or compiled"
            )
        earlier = forwards_of(cls, method)
        if earlier and not calls_super(own, mixin, method):
            raise PlaitError(
                f"{named(mixin)} would replace the {method} that {earlier[0]} gave a {name}, without a word: let it "
                f"call super().{method}, or select only one of the two"
            )
    one.__class__ = _mixed(mixin, cls)


@functools.cache  # one class per pair, so that equal modules stay equal to a compiler
def _mixed(mixin: Any, cls: Any) -> Any:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_mixed_in": mixin}
    return type(cls.__name__, (mixin, cls), names)
