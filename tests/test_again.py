"""Tests that fail are run once more, alone: an unstable one is named and forgiven, a broken one is not."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUITE = """
from pathlib import Path
def test_unstable():
    seen = Path(__file__).with_name("seen")
    before = seen.exists()
    seen.touch()
    assert before
"""


def _twice(folder: Path, suite: str) -> tuple[int, str]:
    """Exit code and output of the second run, after a first one in which something fails."""
    (folder / "test_it.py").write_text(suite)
    (folder / "conftest.py").write_text(
        "import pytest\ndef pytest_itemcollected(item):\n    item.add_marker("
        "pytest.mark.xdist_group('@' in item.name and 'a' or 'b'))\n"
    )
    first = [sys.executable, "-m", "pytest", "-q", "-n", "1", "--dist", "loadgroup"]
    assert subprocess.run(first, cwd=folder, capture_output=True).returncode == 1
    again = subprocess.run([sys.executable, ROOT / "tests/again.py"], cwd=folder, capture_output=True, text=True)
    return again.returncode, again.stdout


@pytest.mark.slow
def test_a_test_that_passes_alone_is_named_and_forgiven(tmp_path: Path) -> None:
    code, said = _twice(tmp_path, SUITE)
    assert code == 0
    assert "unstable: test_it.py::test_unstable" in said
    assert said.splitlines()[-1] == "1 passed, 0 failed"


@pytest.mark.slow
def test_a_test_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    code, said = _twice(
        tmp_path, SUITE + "import pytest\n@pytest.mark.parametrize('a', ['x@y'])\ndef test_broken(a):\n    assert 0\n"
    )
    assert code == 1
    assert "unstable: test_it.py::test_unstable" in said
    assert "test_broken" not in [line for line in said.splitlines() if line.startswith("unstable")]
    assert said.splitlines()[-1] == "1 passed, 1 failed"


@pytest.mark.slow
def test_many_failures_are_no_accident(tmp_path: Path) -> None:
    suite = "import pytest\n@pytest.mark.parametrize('a', range(11))\ndef test_broken(a):\n    assert 0\n"
    code, said = _twice(tmp_path, suite)
    assert code == 1
    assert "11 tests failed" in said
