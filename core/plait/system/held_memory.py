"""Memory that a launcher holds for its ranks, so that it outlives them. It has no name, and ends with its processes."""

import contextlib
import os
from collections.abc import Iterator

PLACES = "PLAIT_MEMORY"  # in the environment of the ranks: a path for each piece
ADDRESS = "PLAIT_MEMORY_AT"  # there, too: where other machines reach these pieces, if there may be others
EACH = 2  # pieces for the copies of one rank


def possible() -> bool:
    """Whether this system has such memory: Linux has."""
    return hasattr(os, "memfd_create")


@contextlib.contextmanager
def held(ranks: int, of_others: bool = False) -> Iterator[list[str]]:
    """Offer `EACH` pieces to each of the machine's ranks that are started inside. They are empty, and grow.

    of_others: whether there are as many again, after those, for the ranks of another machine. Gives the paths of all.
    """
    if not ranks:
        yield []
        return
    pieces = [os.memfd_create(f"plait-copy-{number}") for number in range((1 + of_others) * EACH * ranks)]
    places = [f"/proc/{os.getpid()}/fd/{piece}" for piece in pieces]
    os.environ[PLACES] = ":".join(places)
    try:
        yield places
    finally:
        del os.environ[PLACES]
        for piece in pieces:
            os.close(piece)


def of_this_machine() -> tuple[list[str], str | None]:
    """(the paths of all pieces, the address at which other machines reach them); none if the launcher offers none."""
    places = os.environ.get(PLACES)
    return places.split(":") if places else [], os.environ.get(ADDRESS)
