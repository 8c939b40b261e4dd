"""Space in the launcher's memory where ranks report their end if no disk can be written."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PLACE = "PLAIT_SPARE"  # in the environment of the ranks


@contextlib.contextmanager
def spare() -> Iterator[None]:
    """Offer the space to all processes that are started inside. Systems other than Linux have none."""
    if not hasattr(os, "memfd_create"):
        yield
        return
    memory = os.memfd_create("plait-spare")
    os.environ[PLACE] = f"/proc/{os.getpid()}/fd/{memory}"
    try:
        yield
    finally:
        del os.environ[PLACE]
        os.close(memory)


def put(line: str) -> None:
    """Write a line, if there is a space for it."""
    with contextlib.suppress(KeyError, OSError), Path(os.environ[PLACE]).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def lines() -> list[str]:
    """What was written since the last `clear`."""
    with contextlib.suppress(KeyError, OSError):
        return Path(os.environ[PLACE]).read_text(encoding="utf-8").splitlines()
    return []


def clear() -> None:
    with contextlib.suppress(KeyError, OSError):
        os.truncate(os.environ[PLACE], 0)
