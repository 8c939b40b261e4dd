"""The selected strategies joined by pluggy: who is called, in which order, and whose fault an error is."""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import pluggy

from plait import hookspecs
from plait.errors import PlaitError
from plait.plugins import described
from plait.strategy import Place, claimed, order

TRACE = "PLAIT_TRACE_PLUGINS"
BLAME = "raised by"


class Braid:
    """The hooks of the selected strategies. Made afresh for every run; nothing is process-global.

    Raises PlaitError for a hook that does not exist or asks for unknown arguments, two strategies with the same
    first-result hook, a wrapper around a fold, two claims of one role, and a cycle in the order.
    """

    def __init__(self, strategies: Mapping[str, Any]) -> None:
        self.strategies = dict(strategies)
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
                        implementation.function, name, caller.name
                    )
                    continue
                implementation.function = _attributed(  # type: ignore[misc]
                    implementation.function, name, caller.name, implementation.argnames
                )


def blamed(error: BaseException) -> bool:
    """Whether `error` came out of a strategy's hook; a note of it says whose."""
    return any(note.startswith(BLAME) for note in getattr(error, "__notes__", ()))


def _call(implementation: Any, arguments: Mapping[str, Any]) -> Any:
    return implementation.function(*(arguments[a] for a in implementation.argnames))


def _attributed(function: Callable[..., Any], name: str, hook: str, argnames: tuple[str, ...]) -> Callable[..., Any]:
    """`function`, whose errors name the plugin and the hook, and whose calls are shown where the user asked for it."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            if os.environ.get(TRACE):
                from plait.author.trace import traced

                given = dict(zip(argnames, arguments, strict=True))
                return traced(name, hook, functools.partial(function, *arguments), given)
            return function(*arguments)
        except SystemExit as end:
            raise PlaitError(f"{described(name)} calls sys.exit({end.code!r}) in its hook {hook!r}") from end
        except Exception as error:
            error.add_note(f"{BLAME} {described(name)} in its hook {hook!r}")
            raise

    return call


def _attributed_wrapper(function: Callable[..., Any], name: str, hook: str) -> Callable[..., Any]:
    """The same for a wrapper, through which the errors of those that it wraps come too: they have their note."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return (yield from function(*arguments))
        except Exception as error:
            if not blamed(error):
                error.add_note(f"{BLAME} {described(name)} in its hook {hook!r}")
            raise

    return call
