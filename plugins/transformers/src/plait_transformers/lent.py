"""Parameters that a family reads outside the methods of the module that owns them, as a mixer that computes with the
weight of its convolution does.

Strategies change what is read of a parameter inside its owner's forward and methods that get a tensor. So the module
whose forward reads it runs inside such a method.
"""

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait import mix_in, transform_param
from plait_transformers.documents import in_model


def read_outside(model: nn.Module, blocks: str, tokens: Tensor) -> list[tuple[str, str]]:
    """(reader, owner), for each module of the list `blocks` of which a parameter is read outside its own methods, in
    training or in evaluation; the reader is the innermost module whose forward does so.

    A tensor's dtype and shape are no reading of it, and `data`, which a family writes to, is what is stored.
    """
    tried, names = copy.deepcopy(model), dict[int, str]()
    for fqn, module in tried.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            names[id(parameter)] = fqn
            transform_param(module, name, _another(parameter))
    noted = _Outside(names)
    for fqn, module in tried.named_modules():
        module.register_forward_pre_hook(lambda *_, fqn=fqn: noted.running.append(fqn))
        module.register_forward_hook(lambda *_: noted.running.pop() and None)
    for training in (True, False):
        with noted, torch.random.fork_rng(devices=[]):
            tried.train(training)(tokens)
    return [(reader, owner) for reader, owner in noted.found if owner.startswith(f"{blocks}.")]


def _another(parameter: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns the same values, in a tensor that is not the parameter."""
    value = parameter.detach().clone()
    return lambda _: value


class _Outside(TorchFunctionMode):
    """Notes (module whose forward runs, owner) of each parameter of `names` (id -> owner) that a function gets."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names
        self.running: list[str] = []
        self.found: dict[tuple[str, str], None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":
            for each in (*args, *kwargs.values()):
                if (owner := self._names.get(id(each))) is not None:
                    self.found[self.running[-1], owner] = None
        return func(*args, **kwargs)


class Lends:
    """Mixed into a module that owns parameters."""

    def during(self, x: Tensor, call: Callable[[], Any]) -> Any:
        """What `call()` returns, which reads parameters of this module; `x`: any tensor."""
        return call()


class Borrows:
    """Mixed into a module that reads parameters of others."""

    owners: tuple[Lends, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super()
        call = lambda: plain.forward(*args, **kwargs)  # noqa: E731
        x = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        for owner in self.owners:
            call = _inside(owner, x, call)
        return call()


def _inside(owner: Lends, x: Tensor, call: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: owner.during(x, call)


def give_lent(model: nn.Module, lent: Iterable[tuple[str, str]]) -> None:
    """Let modules read the parameters of others; lent: (reader, owner), in which `*` is the number of a block."""
    for reader, owner in lent:
        for fqn in in_model(model, [owner]):
            number = re.search(r"\d+", fqn)
            its: Any = model.get_submodule(reader.replace("*", number[0] if number else "*"))
            lender: Any = model.get_submodule(fqn)
            mix_in(lender, Lends)
            if not isinstance(its, Borrows):
                mix_in(its, Borrows)
            object.__setattr__(its, "owners", (*getattr(its, "owners", ()), lender))
