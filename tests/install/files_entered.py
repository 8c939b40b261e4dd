"""A program: which files of the core `plait train`, with these overrides, enters before its ranks start; one a line.

A file is entered if a function in it is called; what a module does when it is imported does not count.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import plait.launch.launcher
from plait.commands import start

CORE = str(Path(start.__file__).parents[1])
entered: dict[str, None] = {}  # in the order in which a reader comes by
modules = 0  # that are being imported
run = start._run


def note(frame: FrameType, event: str, argument: Any) -> None:
    global modules
    code = frame.f_code
    if code.co_name == "<module>":
        modules += {"call": 1, "return": -1}.get(event, 0)
    elif event == "call" and not modules and code.co_filename.startswith(CORE):
        entered[code.co_filename] = None


def traced(config: Any, path: Path) -> None:
    sys.setprofile(note)
    run(config, path)


def told(*args: Any, **kwargs: Any) -> NoReturn:
    sys.setprofile(None)
    print(*(Path(file).relative_to(CORE) for file in entered), sep="\n", file=sys.stderr)
    raise SystemExit(0)


if __name__ == "__main__":
    start._run = traced
    plait.launch.launcher.start_ranks = told
    start.start(sys.argv[1:])
