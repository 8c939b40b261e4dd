"""docs/silent-bugs.md names tests and planted bugs that exist, and its figures are those of its rows."""

import re
from collections import Counter

from tests.docs.pages import ROOT
from tests.mutants.mutants import MUTANTS

PAGE = (ROOT / "docs" / "silent-bugs.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| [")]


def test_figures():
    links = [link for links, *_ in ROWS for link in re.findall(r"\]\((https://github\.com/[^)]+)\)", links)]
    assert f"**{len(set(links))} reports of {len(ROWS)} bugs.**" in PAGE
    counted = Counter(answer.partition(":")[0] for *_, answer in ROWS)
    stated = {word: int(count) for word, count in re.findall(r"^\| (\w+) \|.*\| (\d+) \|$", PAGE, re.MULTILINE)}
    assert dict(counted) == stated


def test_planted_bugs_are_planted():
    answers = [answer for *_, answer in ROWS if answer.startswith("planted: ")]
    named = [re.fullmatch(r'planted: "([^"]+)" \(`(\w+)`\).*', answer) for answer in answers]
    assert len(named) > 10
    bugs = {(mutant.bug, mutant.test) for mutant in MUTANTS}
    assert {match and match.groups() for match in named} <= bugs


def test_tests_exist():
    files = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("plugins/*/tests/*.py")]
    files += ROOT.glob("plugins/testing/src/plait_testing/suite/*.py")
    files += ROOT.glob("plugins/testing/src/plait_testing/*_suite.py")
    text = "\n".join(file.read_text() for file in files)
    names = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(names) > 10
    assert not [name for name in names if f"def {name}(" not in text]
