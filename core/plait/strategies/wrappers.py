"""pluggy's wrappers around hooks, and its marks of them. Imported only by runs that have any."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pluggy

from plait.contract.errors import PlaitError
from plait.contract.hookspecs import FIRST_RESULT
from plait.strategies.blame import WrongAnswer, blaming
from plait.strategies.registry import described

NOTHING = object()  # what a wrapper got if what it wraps raised; what a generator gives that did not yield


def check_mark(made: pluggy.HookImpl, hook: str, first_result: bool) -> None:
    """Raises PlaitError for a mark of one strategy's `hook` that such a hook does not take."""
    who, mark = described(made.plugin_name), "tryfirst" if made.tryfirst else "trylast"
    if made.hookwrapper:
        raise PlaitError(
            f"{who} marks its hook {hook!r} with hookwrapper=True; write wrapper=True, and return the answer"
        ).at(hook, "hookwrapper=True", fits=("wrapper=True",))
    if made.wrapper and not first_result:
        raise PlaitError(
            f"{who} wraps the hook {hook!r}, which each strategy answers for itself; wrappers go around "
            f"{', '.join(FIRST_RESULT)}"
        ).at(hook, "wrapper=True", fits=FIRST_RESULT)
    if not made.wrapper and (made.tryfirst or made.trylast):
        raise PlaitError(
            f"{who} marks its hook {hook!r} with {mark}=True, which only wrappers take; strategies act by phase, "
            "before and after"
        ).at(hook, f"{mark}=True", fits=())


def wrapped(method: Callable[..., Any], name: str, hook: str, taken: Callable[[Any], Any]) -> Callable[..., Any]:
    """The wrapper `method`. An error of what it wraps is not its own, and if it got an answer it must return one, which
    `taken` checks. Raises PlaitError if it is no generator."""
    wraps = f"{described(name)} wraps the hook {hook!r}"
    if not inspect.isgeneratorfunction(method):
        raise PlaitError(f"{wraps} and has no `yield`, at which what it wraps acts").at(hook, fits="a generator")

    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        where, got, passing = f"hook {hook!r}", NOTHING, None
        with blaming(name, where):
            wrapper = method(*arguments)
            if next(wrapper, NOTHING) is NOTHING:
                raise WrongAnswer(f"{wraps} and did not yield")
        try:
            got = yield
        except BaseException as error:
            passing = error
        with blaming(name, where, passing=passing):
            try:
                wrapper.throw(passing) if passing else wrapper.send(got)
            except StopIteration as end:
                answer = end.value
            else:
                raise WrongAnswer(f"{wraps} and yielded twice")
            if answer is None and got is not None:
                raise WrongAnswer(f"{wraps} and returned None; it must return what `yield` gave it, or another answer")
            return taken(answer)

    return call
