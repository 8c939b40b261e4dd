"""Plants a mutant in a copy of the repository and runs the tests that could notice it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import attrs

from tests.mutation.draw import ROOT, Mutant
from tests.mutation.recorded import Recorded

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?)(?:@\S+)?(?: - .*)?$", re.MULTILINE)
START = 120  # seconds that a busy machine may need until the first test runs


@attrs.frozen
class Verdict:
    """caught: by which test, or "time" if the tests did not end; None: all `tests` tests passed."""

    caught: str | None
    tests: int
    seconds: float


class Copy:
    """The repository's files once more. Python finds Plait and the plugins in it before the installed ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self.unsound: set[str] = set()  # tests that fail in a copy without any mutant

    def judge(self, mutant: Mutant, tests: Iterable[Recorded]) -> Verdict:
        since, path = time.monotonic(), self.folder / mutant.file
        text = path.read_text()
        left = [test for test in tests if test.name not in self.unsound]
        count = len(left)
        while left:
            path.write_text(mutant.applied(text))
            try:
                failed = self._failed(left)
            finally:
                path.write_text(text)
            if failed is None:
                return Verdict(None, count, time.monotonic() - since)
            suspects = [test for test in left if test.name == failed]
            if not suspects or self._failed(suspects) in (None, "time"):
                return Verdict(failed, count, time.monotonic() - since)
            self.unsound.add(failed)
            left = left[left.index(suspects[0]) + 1 :]
        return Verdict(None, count, time.monotonic() - since)

    def _failed(self, tests: list[Recorded]) -> str | None:
        """The first of them that fails; "time" if they do not end; the last line of pytest if it cannot start."""
        names = self.folder / ".tests"
        names.write_text("\n".join(test.name for test in tests))
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--timeout=120", f"@{names}"]
        process = subprocess.Popen(
            command, cwd=self.folder, env=self._environment(), text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=START + 4 * sum(test.seconds for test in tests))
        except subprocess.TimeoutExpired:
            return "time"
        finally:
            _end(process)
        if process.returncode == 0:
            return None
        failed = FAILED.search(said)
        return failed[1] if failed else (said.strip().splitlines() or ["pytest said nothing"])[-1][:200]

    def _environment(self) -> dict[str, str]:
        places = [self.folder / "core", *sorted(self.folder.glob("plugins/*/src"))]
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, places))}


def _end(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
