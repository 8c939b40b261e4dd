"""In every process that a recorded test starts, and in its forks: which lines it runs, written down when it ends."""

import atexit
import contextlib
import json
import os
import uuid
from typing import NoReturn

FOLDER = os.environ.get("PLAIT_LINES")

if FOLDER and os.environ.get("PLAIT_TEST"):
    import coverage

    measured = coverage.Coverage(
        data_file=None, config_file=False, include=os.environ["PLAIT_SOURCES"].split(os.pathsep)
    )
    written, leave = set[int](), os._exit  # written: ids of the processes that have; a fork gets a copy

    @atexit.register
    def write() -> None:
        test = os.environ.get("PLAIT_TEST")  # as it is now: forks of one process serve many tests
        if test and os.getpid() not in written:
            written.add(os.getpid())
            measured.stop()
            data = measured.get_data()
            lines = {file: data.lines(file) for file in data.measured_files()}
            with open(f"{FOLDER}/{uuid.uuid4()}.json", "w") as file:
                json.dump([test, lines], file)

    def written_and_left(status: int) -> NoReturn:
        with contextlib.suppress(Exception):
            write()
        leave(status)

    os._exit = written_and_left
    measured.start()
