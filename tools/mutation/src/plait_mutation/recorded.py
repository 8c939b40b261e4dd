"""Which tests run which lines, as recorded, and which of them a mutant has to fear."""

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import attrs

from plait_mutation.draw import ROOT, Mutant

# They read the source, and would catch any change of it.
READERS = ("tests/install/", "tests/docs/", "tests/mutants/", "tools/", "tests/benchmarks/")
NEAR = 1.0  # seconds: quicker tests of the same file may look at a run that another test started
MOST = 120.0  # seconds of tests for one mutant


@attrs.frozen
class Recorded:
    """A quick test that passes. lines: file -> the lines that it runs."""

    name: str
    seconds: float
    lines: dict[str, frozenset[int]]

    @property
    def file(self) -> str:
        return self.name.split("::", 1)[0]


def record(folder: Path) -> None:
    """Run all quick tests, with what they run written into `folder`; those that it has are run again only if their file
    has changed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "plait_mutation.record", "-n", "2", "--dist", "loadgroup"]
    env = {**os.environ, "PLAIT_LINES": str(folder), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--timeout", "600"], cwd=ROOT, env=env, check=False)


@functools.cache
def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.exists() else ""


def state_of(name: str) -> str:
    """Of the file of the test `name`: a test that was changed may run other lines."""
    return _digest(ROOT / name.split("::", 1)[0])


def read(folder: Path) -> list[Recorded]:
    started: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file in folder.glob("*.json"):
        name, lines = json.loads(file.read_text())
        for path, found in lines.items():
            started[name][(ROOT / path).relative_to(ROOT).as_posix()].update(found)
    tests = []
    for file in sorted(folder.glob("tests-*.jsonl")):
        for line in file.open():
            name, outcome, seconds, lines, of = json.loads(line)
            if outcome == "passed" and of == state_of(name) and not name.startswith(READERS):
                files = {*lines, *started[name]}
                merged = {f: frozenset([*lines.get(f, ()), *started[name].get(f, ())]) for f in files}
                tests.append(Recorded(name, seconds, merged))
    return tests


def tests_for(mutant: Mutant, tests: Iterable[Recorded]) -> list[Recorded]:
    """Those that run its statement, the likeliest to fail first: of the room, then the quickest.

    What only importing runs is recorded for the first test of a process at most, methods that attrs writes have no
    lines, and no record says what a process runs that is killed: then all tests of the file's room, first those that
    run something else of the file.
    """
    tests = list(tests)
    wanted = range(mutant.lines[0], mutant.lines[1] + 1)
    direct = [t for t in tests if not t.lines.get(mutant.file, frozenset()).isdisjoint(wanted)]
    if mutant.imported or not direct:
        others = (t for t in tests if t not in direct)
        direct += [t for t in others if t.file.startswith(_room(mutant.file))]
    names, files = {t.name for t in direct}, {t.file for t in direct}
    near = [t for t in tests if t.file in files and t.name not in names and t.seconds < NEAR]
    room = _room(mutant.file)
    ordered = sorted(
        [*direct, *near], key=lambda t: (not t.file.startswith(room), mutant.file not in t.lines, t.seconds)
    )
    found: list[Recorded] = []
    total = 0.0
    for test in ordered:
        if total + test.seconds <= MOST:
            found.append(test)
            total += test.seconds
    return found


def _room(file: str) -> str:
    """Where the tests of a source file are: tests/parallel/ of core/plait/parallel/loss.py."""
    parts = Path(file).parts
    return f"plugins/{parts[1]}/" if parts[0] == "plugins" else f"tests/{parts[2]}/"
