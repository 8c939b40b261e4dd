"""Importing torch without garbage collection: it creates a million objects that live as long as the process."""

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Inside, torch may be imported for the first time: no garbage is collected, then or later, among its objects.

    That saves a tenth of the import, and most of a process's end, when Python collects garbage several times.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.freeze)
