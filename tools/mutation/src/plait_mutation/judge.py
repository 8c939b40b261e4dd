"""Plants a mutant in a copy of the repository and runs the tests that could notice it."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import attrs

from plait_mutation.draw import ROOT, Mutant
from plait_mutation.recorded import Recorded
from plait_testing.starter import Starter

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?)(?:@\S+)?(?: - .*)?$", re.MULTILINE)
START = 60  # seconds that a busy machine may need until the first test runs


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
            if (ROOT / name).is_symlink() or (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        self.pytest = Starter.begun("plait_mutation.forked", folder, self._environment())
        self._second = int(time.time())
        self.unsound: set[str] = set()  # tests that fail in a copy without any mutant

    def judge(self, mutant: Mutant, tests: Iterable[Recorded]) -> Verdict:
        since, path = time.monotonic(), self.folder / mutant.file
        text = path.read_text()
        left = [test for test in tests if test.name not in self.unsound]
        count = len(left)
        while left:
            self._write(path, mutant.applied(text))
            try:
                failed = self._failed(left)
            finally:
                self._write(path, text)
            if failed is None:
                return Verdict(None, count, time.monotonic() - since)
            suspects = [test for test in left if test.name == failed]
            if not suspects and failed != "time" and (why := self._failed(left, "--collect-only")):
                unknown = {test.name for test in left if why.endswith(f"/{test.name.split('[', 1)[0]}")}
                if not unknown:
                    raise RuntimeError(f"without the mutant: {why}")
                self.unsound |= unknown
                left = [test for test in left if test.name not in unknown]
                continue
            if not suspects or self._failed(suspects) in (None, "time"):
                return Verdict(failed, count, time.monotonic() - since)
            self.unsound.add(failed)
            left = left[left.index(suspects[0]) + 1 :]
        return Verdict(None, count, time.monotonic() - since)

    def _failed(self, tests: list[Recorded], *more: str) -> str | None:
        """The first of them that fails; "time" if they do not end; the last line of pytest if it cannot start."""
        names = self.folder / ".tests"
        names.write_text("\n".join(test.name for test in tests))
        argv = ["-x", "-p", "no:cacheprovider", "--timeout=120", *more, f"@{names}"]
        try:
            done = self.pytest.run(
                argv, self.folder, self._environment(), START + 4 * sum(test.seconds for test in tests)
            )
        except subprocess.TimeoutExpired:
            return "time"
        if done.returncode == 0:
            return None
        failed = FAILED.search(done.stdout)
        said = f"{done.stdout}\n{done.stderr}".strip().splitlines() or ["pytest said nothing"]
        errors = [line for line in said if line.startswith("ERROR")]  # where a name is unknown, a line follows
        return failed[1] if failed else (errors or said)[-1]

    def _write(self, path: Path, text: str) -> None:
        """Python takes a file for unchanged if size and second are the same: each text has its own second."""
        path.write_text(text)
        self._second += 1
        os.utime(path, (self._second, self._second))

    def _environment(self) -> dict[str, str]:
        places = [self.folder / "core", *sorted(self.folder.glob("plugins/*/src"))]
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_CBWR": "COMPATIBLE",
            "PYTHONPATH": os.pathsep.join(map(str, places)),
        }
