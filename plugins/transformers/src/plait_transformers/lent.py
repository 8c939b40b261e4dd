"""Parameters that a family reads outside the forward of the module that owns them, as a mixer that computes with the
weight of its convolution does.

Strategies change what is read of a parameter inside its owner's forward and methods that get a tensor. So the reader
runs inside such a method.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from plait import mix_in
from plait_transformers.documents import in_model


class Lends:
    """Mixed into a module that owns parameters."""

    def during(self, x: Tensor, call: Callable[[], Any]) -> Any:
        """What `call()` returns, which reads parameters of this module; `x`: any tensor."""
        return call()


class Borrows:
    """Mixed into a module that reads parameters of modules inside it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super()
        reader: Any = self
        call = lambda: plain.forward(*args, **kwargs)  # noqa: E731
        x = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        for owner in reader.children():
            if isinstance(owner, Lends):
                call = _inside(owner, x, call)
        return call()


def _inside(owner: Lends, x: Tensor, call: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: owner.during(x, call)


def give_lent(model: nn.Module, owners: Iterable[str]) -> None:
    """Let the modules around those that the patterns `owners` name read their parameters."""
    for fqn in in_model(model, owners):
        mix_in(model.get_submodule(fqn), Lends)
        reader = model.get_submodule(fqn.rpartition(".")[0])
        if not isinstance(reader, Borrows):
            mix_in(reader, Borrows)
