"""Runs the tests that failed in the last run once more, alone: those that pass now are unstable, and are printed.

`make test AGAIN=1` calls it, as .ci/run does: a busy machine must not fail a change, nor hide an unstable test.
"""

import json
import subprocess
import sys
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")
MOST = 10  # more than these are no accident


def main() -> int:
    # among processes of pytest-xdist a test's name ends with its group
    failed = sorted({name.rpartition("@")[0] or name for name in json.loads(FAILED.read_text(encoding="utf-8"))})
    if len(failed) > MOST:
        print(f"{len(failed)} tests failed, more than the {MOST} that are run once more")
        return 1
    unstable = [test for test in failed if subprocess.run([sys.executable, "-m", "pytest", test]).returncode == 0]
    for test in unstable:
        print(f"unstable: {test} failed among others and passes alone")
    print(f"{len(unstable)} passed, {len(failed) - len(unstable)} failed")
    return len(failed) > len(unstable)


if __name__ == "__main__":
    sys.exit(main())
