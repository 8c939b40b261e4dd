"""Which cases of quick tests only repeat others.

A case repeats others if another case of the same test stays quick, every line that it runs is run by two other quick
tests at least, and it caught no mutant. The dear ones go into tests/repeats.txt, which makes them slow tests.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from plait_mutation import recorded
from plait_mutation.draw import ROOT

LIST = ROOT / "tests" / "repeats.txt"
DEAR = 0.6  # seconds, as recorded
OTHERS = 2  # quick tests that still run each line


def repeats(tests: Iterable[recorded.Recorded], catchers: set[str]) -> list[str]:
    """Names of such cases, the dearest first. catchers: tests that caught a mutant."""
    tests = sorted(tests, key=lambda test: -test.seconds)
    runs = Counter((file, line) for test in tests for file, lines in test.lines.items() for line in lines)
    cases = Counter(_function(test.name) for test in tests)
    found = []
    for test in tests:
        if test.seconds < DEAR:
            break
        own = [(file, line) for file, lines in test.lines.items() for line in lines]
        if cases[_function(test.name)] > 1 and test.name not in catchers and all(runs[at] > OTHERS for at in own):
            found.append(test.name)
            cases[_function(test.name)] -= 1
            runs.subtract(own)
    return found


def _function(name: str) -> str:
    return name.partition("[")[0]


def write(file: Path, found: Iterable[str]) -> None:
    """Add them to the list; those that it has are slow already, and were not recorded."""
    kept = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    file.write_text("\n".join(sorted({*kept, *found})) + "\n", encoding="utf-8")
