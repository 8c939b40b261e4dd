"""The page of bugs that were found has each row of its benchmarks, which write them there."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def of_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("tables", "detectors", "setups", "environments", "machine")
    modules = {name: __import__(name) for name in names}
    yield modules
    for name in names:
        sys.modules.pop(name, None)


def test_each_bug_and_each_set_up_has_its_row(of_benchmarks):
    lines = of_benchmarks["tables"].PAGE.read_text(encoding="utf-8").splitlines()
    for bug in of_benchmarks["detectors"].BUGS:
        rows = [line for line in lines if line.startswith(f"| {bug.report} | {bug.release} | yes | yes | ")]
        assert len(rows) == 1, bug.report
        assert rows[0].endswith(f"| {bug.tests} |")
    setups = of_benchmarks["setups"]
    for words, _ in {**setups.SETUPS, **setups.PLANTED}.values():
        assert sum(line.startswith(f"| {words} | ") for line in lines) == 1, words


def test_rows_are_replaced_in_place(of_benchmarks, tmp_path):
    page, write = tmp_path / "page.md", of_benchmarks["tables"].write
    page.write_text("# A\n\n| a | b |\n|---|---|\n| x | 1 |\n| y | 2 |\n\nMeasured on 2020-01-01 by hand.\n\nMore.\n")
    write(page, "| a | b |", 1, ["| x | 3 |", "| z | 4 |"], "Measured on 2026-02-03.")
    rows = "| x | 3 |\n| y | 2 |\n| z | 4 |"
    assert page.read_text() == f"# A\n\n| a | b |\n|---|---|\n{rows}\n\nMeasured on 2026-02-03.\n\nMore.\n"
    with pytest.raises(SystemExit, match="no table"):
        write(page, "| c |", 1, [])
