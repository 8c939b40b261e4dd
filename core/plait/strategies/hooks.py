"""The selected strategies joined by pluggy: who is called, in which order, and whose fault an error is."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import pluggy

from plait.contract import hookspecs
from plait.contract.errors import PlaitError, left
from plait.contract.exact import Misfit, short
from plait.strategies.order import Place, claimed, order
from plait.strategies.registry import described
from plait.system.signals import asked_to_stop

TRACE = "PLAIT_TRACE_PLUGINS"
BLAME = "raised by"


@attrs.frozen
class Owed:
    """what: in words. take: the answer as the core uses it; raises Misfit for one of another kind."""

    what: str
    take: Callable[[Any], Any]


class Unowed(PlaitError):
    """A hook answered what it does not owe; the message says whose."""


class Braid:
    """The hooks of the selected strategies. Made afresh for every run; nothing is process-global.

    Raises PlaitError for a hook that does not exist or asks for unknown arguments, two strategies with the same
    first-result hook, a wrapper around a fold, two claims of one role, and a cycle in the order; and where a hook
    answers what it does not owe: `answers` is `plait.parallel.answers.ANSWERS`, apart from here since it needs torch.
    """

    def __init__(self, strategies: Mapping[str, Any], answers: Mapping[str, Owed] | None = None) -> None:
        self.strategies, self._answers = dict(strategies), answers or {}
        self.places: list[Place] = order(self.strategies)
        self.roles: dict[str, str] = claimed(self.strategies)
        self._manager = pluggy.PluginManager("plait")
        self._manager.add_hookspecs(hookspecs)
        for place in reversed(self.places):  # pluggy calls the last registered first
            self._register(place.name, self.strategies[place.name])
        for hook in hookspecs.FIRST_RESULT:
            owners = self.owners(hook)
            if len(owners) > 1:
                raise PlaitError(
                    f"strategies {owners[0]!r} and {owners[1]!r} both implement {hook!r}, which only one may"
                )

    def owners(self, hook: str) -> list[str]:
        """Who implements `hook`, in order."""
        implementations = getattr(self._manager.hook, hook).get_hookimpls()
        return [i.plugin_name for i in reversed(implementations) if not (i.hookwrapper or i.wrapper)]

    def implemented(self, hook: str) -> bool:
        """Whether a strategy implements or wraps `hook`."""
        return bool(getattr(self._manager.hook, hook).get_hookimpls())

    def all(self, hook: str, **arguments: Any) -> None:
        getattr(self._manager.hook, hook)(**arguments)

    def answers(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """(strategy, answer) of everyone who implements `hook`, in order."""
        return [(i.plugin_name, _call(i, arguments)) for i in self._plain(hook)]

    def first(self, hook: str, default: Callable[..., Any], **arguments: Any) -> Any:
        """The one answer there is, or the core's default where nobody gives one."""
        answer = getattr(self._manager.hook, hook)(**arguments)
        return default(**arguments) if answer is None else answer

    def fold(self, hook: str, name: str, value: str, **arguments: Any) -> Any:
        """`arguments[value]` after strategy `name` has acted on it; None from the hook means: changed in place."""
        for implementation in self._plain(hook):
            if implementation.plugin_name == name:
                answer = _call(implementation, arguments)
                return arguments[value] if answer is None else answer
        return arguments[value]

    def _plain(self, hook: str) -> list[Any]:
        return list(reversed(getattr(self._manager.hook, hook).get_hookimpls()))

    def _register(self, name: str, strategy: Any) -> None:
        try:
            self._manager.register(strategy, name=name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            reason = str(error).split("\n")
            raise PlaitError(
                f"{described(name)} does not fit the hooks of API {hookspecs.API}: {' '.join(reason)}"
            ) from error
        for caller in self._manager.get_hookcallers(strategy) or ():
            for implementation in caller.get_hookimpls():
                if implementation.plugin is not strategy:
                    continue
                if implementation.hookwrapper or implementation.wrapper:
                    if caller.name in hookspecs.FOLDS:
                        raise PlaitError(f"{described(name)} wraps the hook {caller.name!r}; a fold takes no wrappers")
                    implementation.function = _attributed_wrapper(  # type: ignore[misc]
                        implementation.function, name, caller.name, self._answers.get(caller.name)
                    )
                    continue
                implementation.function = _attributed(  # type: ignore[misc]
                    implementation.function, name, caller.name, implementation.argnames, self._answers.get(caller.name)
                )


def blamed(error: BaseException) -> bool:
    """Whether `error` came out of a strategy's hook; a note of it says whose."""
    return any(note.startswith(BLAME) for note in getattr(error, "__notes__", ()))


def _call(implementation: Any, arguments: Mapping[str, Any]) -> Any:
    return implementation.function(*(arguments[a] for a in implementation.argnames))


def _attributed(
    function: Callable[..., Any], name: str, hook: str, argnames: tuple[str, ...], owed: Owed | None
) -> Callable[..., Any]:
    """`function`, whose errors name the plugin and the hook, and whose calls are shown where the user asked for it."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        with _blame(name, hook):
            if os.environ.get(TRACE):
                from plait.strategies.trace import traced

                given = dict(zip(argnames, arguments, strict=True))
                answer = traced(name, hook, functools.partial(function, *arguments), given)
            else:
                answer = function(*arguments)
            return _taken(answer, name, hook, owed)

    return call


def _attributed_wrapper(function: Callable[..., Any], name: str, hook: str, owed: Owed | None) -> Callable[..., Any]:
    """The same for a wrapper, through which the errors of those that it wraps come too: they have their note."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        with _blame(name, hook, GeneratorExit):  # how Python ends a generator
            return _taken((yield from function(*arguments)), name, hook, owed)

    return call


def _taken(answer: Any, name: str, hook: str, owed: Owed | None) -> Any:
    if owed is None:
        return answer
    try:
        return owed.take(answer)
    except Misfit:
        answered = f"{described(name)} returned {short(repr(answer))} from its hook {hook!r}"
        raise Unowed(f"{answered}, which owes {owed.what}") from None


@contextlib.contextmanager
def _blame(name: str, hook: str, *passing: type[BaseException]) -> Iterator[None]:
    """Errors inside name the plugin and the hook, unless they name one already."""
    try:
        yield
    except Unowed:
        raise
    except Exception as error:
        if not blamed(error):
            error.add_note(f"{BLAME} {described(name)} in its hook {hook!r}")
        raise
    except BaseException as error:
        if asked_to_stop(error) or isinstance(error, passing):
            raise
        raise PlaitError(f"{described(name)} {left(error)} in its hook {hook!r}") from error
