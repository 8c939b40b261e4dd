"""What a strategy must leave as it finds it: tied parameters, and what others gave the modules of a model."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import attrs
from torch import nn

from plait.contract.errors import PlaitError
from plait.parallel.given_forwards import calls_super, forwards_of, named, reaches
from plait.parallel.state import canonical
from plait.strategies.registry import described
from plait.system.torch_internals.modules import hooks_of


@attrs.frozen
class Given:
    """What one module was given. classes: in words, the last first. forward: the module's own, or its class's.
    own: whether it is the module's. hooks: how many."""

    fqn: str
    classes: tuple[str, ...]
    forward: Any
    own: bool
    hooks: int

    @classmethod
    def of(cls, fqn: str, module: nn.Module) -> "Given":
        own, its_class = "forward" in module.__dict__, cast(Any, type(module))
        hooks = sum(map(len, hooks_of(module).values()))
        forward = module.__dict__["forward"] if own else its_class.forward
        return cls(fqn, forwards_of(its_class), forward, own, hooks)

    def __str__(self) -> str:
        if self.own:
            return f"the forward {named(self.forward)}"
        return f"the forward that {self.classes[0]} gave it" if self.classes else f"its {self.hooks} hook(s)"

    def __bool__(self) -> bool:
        return bool(self.own or self.classes or self.hooks)


class Kept:
    """What stands in a model before a strategy acts; `check` says whether it still does, then looks again."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._look(parts)

    def check(self, parts: Iterable[nn.Module], strategy: str, cut: bool = False) -> None:
        """Raises PlaitError, which names `strategy`, if it untied parameters, replaced a module that another gave a
        forward or hooks, replaced such a forward by one that does not call it, or registered one hook twice.

        cut: whether it may leave modules out: those of other stages.
        """
        parts = list(parts)
        self._check_ties(parts, strategy)
        modules = {module: fqn for part in parts for fqn, module in part.named_modules()}
        for module, before in self._given.items():
            if module not in modules:
                if not cut:
                    raise PlaitError(
                        f"{described(strategy)} replaced the {type(module).__name__} {before.fqn!r}, and so took from "
                        f"the model {before}: change the module in place, or keep it inside of the new one"
                    )
                continue
            now = Given.of(before.fqn, module)
            lost = [each for each in before.classes if each not in now.classes]
            if lost or (now.forward is not before.forward and _undoes(module, before, now)):
                by = f"the forward that {lost[0]} gave it" if lost else str(before)
                raise PlaitError(
                    f"{described(strategy)} gave {before.fqn or 'the model'!r} the forward {named(now.forward)}, which "
                    f"does not call {by}: let it call the one that it replaces, or select only one of the two"
                )
        for module, fqn in modules.items():
            for kind, hooks in hooks_of(module).items():
                twice = [hook for hook, count in Counter(map(id, hooks.values())).items() if count > 1]
                if twice and (module, kind) not in self._twice:
                    hook = next(each for each in hooks.values() if id(each) == twice[0])
                    raise PlaitError(
                        f"{described(strategy)} registered the hook {named(hook)} twice on {fqn or 'the model'!r}, so "
                        "it would act twice: register it once"
                    )
        self._look(parts)

    def _look(self, parts: Iterable[nn.Module]) -> None:
        parts = list(parts)
        every = {module: fqn for part in parts for fqn, module in part.named_modules()}
        self._given = {module: given for module, fqn in every.items() if (given := Given.of(fqn, module))}
        self._twice = {
            (module, kind)
            for module in every
            for kind, hooks in hooks_of(module).items()
            if len({*map(id, hooks.values())}) < len(hooks)
        }
        self._ties: list[list[str]] = [names for names in _names(parts).values() if len(names) > 1]

    def _check_ties(self, parts: list[nn.Module], strategy: str) -> None:
        now = {name: key for key, names in _names(parts).items() for name in names}
        for names in self._ties:
            first, *others = [name for name in names if name in now] or [""]
            for other in others:
                if now[other] != now[first]:
                    raise PlaitError(
                        f"{described(strategy)} made two parameters of {first!r} and {other!r}, which the model ties: "
                        "they would train apart; replace a tied parameter under each of its names, as "
                        "plait.distribute_params does"
                    )


def _undoes(module: nn.Module, before: Given, now: Given) -> bool:
    """Whether a forward that `module` was given is not part of its new one."""
    if not (before.own or before.classes) or reaches(now.forward, before.forward):
        return False
    return now.own or before.own or not calls_super(now.forward, type(module))


def _names(parts: Iterable[nn.Module]) -> dict[int, list[str]]:
    """id of a parameter -> its names."""
    names: dict[int, list[str]] = {}
    for part in parts:
        for name, param in part.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(canonical(name))
    return names
