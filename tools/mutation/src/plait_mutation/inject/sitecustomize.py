"""In every process that a recorded test starts: which lines it runs, written down when it ends."""

import atexit
import json
import os
import sys
import uuid

FOLDER, TEST = os.environ.get("PLAIT_LINES"), os.environ.get("PLAIT_TEST")

if FOLDER and TEST and "multiprocessing" not in " ".join(sys.orig_argv):
    import coverage

    measured = coverage.Coverage(
        data_file=None, config_file=False, include=os.environ["PLAIT_SOURCES"].split(os.pathsep)
    )

    @atexit.register
    def write() -> None:
        measured.stop()
        data = measured.get_data()
        lines = {file: data.lines(file) for file in data.measured_files()}
        with open(f"{FOLDER}/{uuid.uuid4()}.json", "w") as file:
            json.dump([TEST, lines], file)

    measured.start()
