"""Memory that a launcher holds for its ranks, so that it outlives them. It has no name, and ends with its processes."""

import contextlib
import os
from collections.abc import Iterator

PLACES = "PLAIT_MEMORY"  # in the environment of the ranks: a path for each piece
EACH = 2  # pieces per rank


def possible() -> bool:
    """Whether this system has such memory: Linux has."""
    return hasattr(os, "memfd_create")


@contextlib.contextmanager
def held(ranks: int) -> Iterator[None]:
    """Offer `EACH` pieces to each of the machine's ranks that are started inside. They are empty, and grow."""
    if not ranks:
        yield
        return
    pieces = [os.memfd_create(f"plait-copy-{number}") for number in range(EACH * ranks)]
    os.environ[PLACES] = ":".join(f"/proc/{os.getpid()}/fd/{piece}" for piece in pieces)
    try:
        yield
    finally:
        del os.environ[PLACES]
        for piece in pieces:
            os.close(piece)


def of_this_rank() -> list[str]:
    """The paths of the pieces of this rank; none if its launcher offers none."""
    places, first = os.environ.get(PLACES), EACH * int(os.environ.get("LOCAL_RANK", "0"))
    return places.split(":")[first : first + EACH] if places else []
