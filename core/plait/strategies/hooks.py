"""The selected strategies registered with pluggy: calls their hooks in order, and names the culprit of an error."""

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import pluggy

from plait.contract import hookspecs
from plait.contract.errors import PlaitError, short
from plait.contract.exact import Misfit
from plait.strategies.blame import WrongAnswer, blaming
from plait.strategies.order import Turn, claimed, order
from plait.strategies.registry import described, installed, load

CORE = "plait"  # the name of the plugin with the core's answers
TRACE = "PLAIT_TRACE_PLUGINS"
HOOKS = tuple(name for name, hook in vars(hookspecs).items() if hasattr(hook, "plait_spec"))


@attrs.frozen
class Required:
    """what: the required answer in words. take: converts an answer; raises Misfit for a wrong one."""

    what: str
    take: Callable[[Any], Any]


class Hooks:
    """The hooks of the selected strategies. Every run has its own instance; nothing is process-global.

    required: the required answers of hooks; a hook that answers something else raises. defaults: the core's own
    answers, a plugin below all strategies. Both need torch, so they come from `plait.parallel`.
    A hook that a strategy names in `hooks_off` is left out, as if its class did not have it.
    Raises PlaitError for a hook that does not exist or asks for unknown arguments, two strategies with the same
    first-result hook, a mark that a hook does not take, two claims of one role, and a cycle in the order.
    """

    def __init__(
        self, strategies: Mapping[str, Any], required: Mapping[str, Required] | None = None, defaults: Any = None
    ) -> None:
        self.strategies, self._required = dict(strategies), required or {}
        self.turns: list[Turn] = order(self.strategies)
        self.roles: dict[str, str] = claimed(self.strategies)
        self._manager = pluggy.PluginManager("plait")
        self._manager.add_hookspecs(hookspecs)
        self._further = False  # whether the hooks that packages specify are known too
        if defaults is not None:
            self._manager.register(defaults, name=CORE)
        for turn in reversed(self.turns):  # pluggy calls the last registered first
            self._register(turn.name, self.strategies[turn.name])
        for hook, caller in vars(self._manager.hook).items():
            if caller.spec:
                self._check(hook, caller.spec.opts["firstresult"])

    def _check(self, hook: str, first_result: bool) -> None:
        """Raises PlaitError for a mark that `hook` does not take, and two owners of a first-result hook."""
        for made in self._of_strategies(hook):
            if made.wrapper or made.hookwrapper or made.tryfirst or made.trylast:
                from plait.strategies.wrappers import check_mark  # few strategies have any

                check_mark(made, hook, first_result)
        owners = self.owners(hook) if first_result else []
        if len(owners) > 1:
            raise PlaitError(f"strategies {owners[0]!r} and {owners[1]!r} both implement {hook!r}; only one may").at(
                "strategy", tuple(owners[:2])
            )

    def owners(self, hook: str) -> list[str]:
        """The strategies that implement `hook`, in order."""
        return [i.plugin_name for i in reversed(self._of_strategies(hook)) if not (i.hookwrapper or i.wrapper)]

    def implemented(self, hook: str) -> list[str]:
        """The strategies that wrap `hook`, the outermost first, then those that implement it, in order."""
        return [i.plugin_name for i in reversed(self._of_strategies(hook))]

    def all(self, hook: str, **arguments: Any) -> None:
        """Call `hook` of every strategy, in order; what they return is not asked for."""
        self._caller(hook)(**arguments)

    def answers(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """(strategy, answer) of every strategy that implements `hook`, in order. Raises AttributeError for a hook that
        nobody specifies."""
        return [(i.plugin_name, _call(i, arguments)) for i in reversed(self._of_strategies(hook))]

    def first(self, hook: str, **arguments: Any) -> Any:
        """The answer of the strategy that has one, else the core's; None without any."""
        return self._caller(hook)(**arguments)

    def answer(self, hook: str, name: str, **arguments: Any) -> Any:
        """The answer of strategy `name`; None if it does not implement `hook`."""
        return next((_call(i, arguments) for i in self._of_strategies(hook) if i.plugin_name == name), None)

    def fold(self, hook: str, name: str, value: str, **arguments: Any) -> Any:
        """`arguments[value]` after strategy `name` has acted on it; None from the hook means that it changed it in
        place."""
        answer = self.answer(hook, name, **arguments)
        return arguments[value] if answer is None else answer

    def _of_strategies(self, hook: str) -> list[pluggy.HookImpl]:
        return [i for i in self._caller(hook).get_hookimpls() if i.plugin_name != CORE]

    def _caller(self, hook: str) -> pluggy.HookCaller:
        if not hasattr(self._manager.hook, hook):
            self._specify_further()
        return getattr(self._manager.hook, hook)

    def _specify_further(self) -> None:
        """Add the hooks that packages specify: only if one is asked for, because they must be imported."""
        if not self._further:
            self._further = True
            for package in installed("hookspecs"):
                module, which = load(package, "hookspecs"), described(package, "hookspecs")
                for hook in vars(self._manager.hook):
                    if hasattr(getattr(module, hook, None), "plait_spec"):
                        raise PlaitError(
                            f"{which} specifies {hook!r}, which is a hook already: give yours another name"
                        )
                try:
                    self._manager.add_hookspecs(module)
                except ValueError as error:  # no function of it is marked
                    raise PlaitError(f"{which} must be a module with functions @plait.hookspec: {error}") from None

    def _register(self, name: str, strategy: Any) -> None:
        if any(not hasattr(hookspecs, hook) for _, hook, _ in marked(strategy)):
            self._specify_further()
        for hook in HOOKS:
            method = inspect.getattr_static(type(strategy), hook, None)
            if inspect.isfunction(method) and not hasattr(method, "plait_impl"):
                raise PlaitError(
                    f"{described(name)} has a method {hook!r}, the name of a hook, without @plait.hookimpl, so nobody "
                    "would call it: mark it, or give it another name"
                ).at("strategy", name)
        try:
            self._manager.register(_attributed(strategy, name, self._required), name=name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            reason = str(error).split("\n")
            raise PlaitError(
                f"{described(name)} does not fit the hooks of API {hookspecs.API}: {' '.join(reason)}"
            ) from error


def marked(strategy: Any) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(attribute, hook, options of the mark) of every method that is marked as a hook."""
    for attribute in dir(strategy):
        static = inspect.getattr_static(strategy, attribute, None)  # properties are left alone
        options = getattr(getattr(static, "__func__", static), "plait_impl", None)
        if options is not None:
            yield attribute, options["specname"] or attribute, options


def _call(implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    return implementation.function(*(arguments[a] for a in implementation.argnames))


def _attributed(strategy: Any, name: str, required: Mapping[str, Required]) -> Any:
    """A plugin with the hooks of `strategy`: errors in them name the plugin and the hook, and answers are checked."""
    body: dict[str, Any] = {"__repr__": lambda self: repr(strategy)}
    for attribute, hook, options in marked(strategy):
        if hook in getattr(strategy, "hooks_off", ()):
            continue
        method, needs = getattr(strategy, attribute), required.get(hook)
        if options["wrapper"] or options["hookwrapper"]:
            from plait.strategies.wrappers import wrapped

            taken = functools.partial(_taken, name=name, hook=hook, required=needs)
            body[attribute] = staticmethod(wrapped(method, name, hook, taken))
        else:
            body[attribute] = staticmethod(_around(method, name, hook, needs))
    return type("Attributed", (), body)()


def _around(method: Callable[..., Any], name: str, hook: str, required: Required | None) -> Callable[..., Any]:
    """`method`, with errors that name the plugin and the hook, and a trace of its calls if the user asks for one."""

    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        with blaming(name, f"hook {hook!r}"):
            if os.environ.get(TRACE):
                from plait.strategies.hook_trace import traced

                given = dict(zip(inspect.signature(method).parameters, arguments, strict=False))
                answer = traced(name, hook, functools.partial(method, *arguments), given)
            else:
                answer = method(*arguments)
            return _taken(answer, name, hook, required)

    return call


def _taken(answer: Any, name: str, hook: str, required: Required | None) -> Any:
    if required is None:
        return answer
    try:
        return required.take(answer)
    except Misfit:
        answered = f"{described(name)} returned {short(repr(answer))} from its hook {hook!r}"
        raise WrongAnswer(f"{answered}, which must return {required.what}") from None
