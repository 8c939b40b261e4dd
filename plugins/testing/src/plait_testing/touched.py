"""Which parameters a strategy changes: what is stored of them, or what their modules compute with them."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

from torch import nn
from torch.distributed.tensor import DTensor

from plait import canonical
from plait.host import plugins
from plait_testing.torch_internals import hooks_of, hooks_of_tensor
from plait_testing.trial import Trial


def touched(trial: Trial, strategies: Mapping[str, Mapping[str, Any]], strategy: str) -> set[str]:
    """FQNs of the parameters that `strategy` adds, and of those that are other ones after its turn, or whose modules
    have another class, forward or hooks; if it adds some, of these alone. On all ranks that call it together."""
    found: set[str] = set()

    def watched(hook: str, method: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(method).parameters)

        @functools.wraps(method)
        def call(*arguments: Any) -> Any:
            model = dict(zip(names, arguments, strict=True))["model"]
            before = _looks(model)
            answer = method(*arguments)
            made = answer if isinstance(answer, list) else [answer if isinstance(answer, nn.Module) else model]
            after = {fqn: look for part in made for fqn, look in _looks(part).items()}
            added = after.keys() - before.keys() if hook == "extend" else ()
            found.update(added or (fqn for fqn, look in after.items() if before.get(fqn) != look))
            return answer

        return call

    cls = plugins.load(strategy)
    with contextlib.ExitStack() as patches:
        for hook in ("extend", "parallelize"):
            if method := getattr(cls, hook, None):
                patches.enter_context(mock.patch.object(cls, hook, watched(hook, method)))
        trial.apply(strategies)
    return found


def _looks(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """FQN of each parameter -> what a strategy may change about it. Holds the parameters, so that none is taken for a
    new one in the same place."""
    looks = {}
    for prefix, module in model.named_modules():
        forward, held = module.__dict__.get("forward"), getattr(module, "_transforms", None)
        for name, param in module.named_parameters(recurse=False):
            lies = param.placements if isinstance(param, DTensor) else None
            transforms = len(held.of.get(name, ())) if held else 0
            own = (_Same(param), str(lies), transforms, hooks_of_tensor(param), param.requires_grad)
            looks[canonical(f"{prefix}.{name}".lstrip("."))] = (*own, type(module), forward, hooks_of(module))
    return looks


class _Same:
    """Equal to another of the same object: parameters themselves compare by their values."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.what is other.what

    __hash__ = None  # type: ignore[assignment]
