"""docs/silent-bugs.md names tests and planted bugs that exist, and enough reports."""

import re

from tests.docs.pages import ROOT
from tests.mutants.mutants import MUTANTS

PAGE = (ROOT / "docs" / "silent-bugs.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| [")]


def test_enough_reports():
    assert len(ROWS) >= 25
    links = [link for row in ROWS for link in re.findall(r"\]\((https://github\.com/[^)]+)\)", row.split(" | ")[0])]
    assert len(set(links)) >= 35


def test_planted_bugs_are_planted():
    bugs = {mutant.bug: mutant.test for mutant in MUTANTS}
    for row in ROWS:
        for bug in re.findall(r'"([^"]+)"', row.split("planted: ")[1]) if "planted: " in row else ():
            assert bug in bugs, bug
    assert len({bug for bug in bugs if f'"{bug}"' in PAGE}) >= 15


def test_tests_exist():
    files = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("plugins/*/tests/*.py")]
    files += ROOT.glob("core/plait/testing/suite/*.py")
    text = "\n".join(file.read_text() for file in files)
    for name in set(re.findall(r"`(test_\w+)`", PAGE)):
        assert f"def {name}(" in text, name
