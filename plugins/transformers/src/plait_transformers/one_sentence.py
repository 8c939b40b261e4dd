"""What transformers and torch raise about a family, as one sentence."""

import contextlib
from collections.abc import Iterator

from plait import PlaitError

LENGTH = 300  # characters of another library's error


@contextlib.contextmanager
def one_sentence(what: str) -> Iterator[None]:
    """What is raised inside becomes a PlaitError: `what`, then the error in a line. PlaitErrors stay as they are."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        raise PlaitError(f"{what} {type(error).__name__}: {in_a_line(error)}") from error


def in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:LENGTH]
