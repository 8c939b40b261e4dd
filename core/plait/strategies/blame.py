"""Whose fault an error is: notes that name the plugin, and what of it raised."""

import contextlib
from collections.abc import Iterator

from plait.contract.errors import PlaitError
from plait.strategies.registry import described
from plait.system.errors import left
from plait.system.signals import asked_to_stop

BLAME = "raised by"


class WrongAnswer(PlaitError):
    """A hook returned a wrong answer; the message names its strategy."""


def blamed(error: BaseException) -> bool:
    """Whether `error` came out of a strategy's hook; one of its notes names the strategy."""
    return any(note.startswith(BLAME) for note in getattr(error, "__notes__", ()))


@contextlib.contextmanager
def blaming(name: str, where: str, kind: str = "strategy", passing: BaseException | None = None) -> Iterator[None]:
    """Errors raised inside get a note with the plugin `name` and what of it raised them, such as "hook 'compile'",
    unless they have one. passing: an error that came from elsewhere and passes as it is."""
    try:
        yield
    except WrongAnswer:
        raise
    except Exception as error:
        if error is not passing and not blamed(error):
            error.add_note(f"{BLAME} {described(name, kind)} in its {where}")
        raise
    except BaseException as error:
        if error is passing or asked_to_stop(error):
            raise
        raise PlaitError(f"{described(name, kind)} {left(error)} in its {where}") from error
