"""Every bug of `runs.py` fails the one test that it names, which passes without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.planted import ROOT, copied
from tests.mutants.runs import BUGS, Bug


def asked(folder: Path, tests: list[str], bug: Bug | None = None) -> tuple[int, str]:
    """(exit code, what pytest prints) of these tests in a copy of Plait with the bug; 1: a test failed."""
    path = os.pathsep.join(copied(folder, bug))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", *tests]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8")
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_bug_all_pass(tmp_path: Path) -> None:
    code, said = asked(tmp_path / "twin", sorted({bug.test for bug in BUGS}))
    assert code == 0, said


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.bug)
def test_caught(tmp_path: Path, bug: Bug) -> None:
    code, said = asked(tmp_path / "copy", [bug.test], bug)
    assert code == 1, said
    assert bug.says in said, said
