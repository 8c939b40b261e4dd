"""The grid of families under strategies: what its table says, and that it is measured."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from grid import BEGIN, END, PAGE, UNDER, Outcome, kinds, read, table, told, write
from releases import changed

GRID = Path(__file__).with_name("grid.py")


def test_families_with_one_outcome_share_a_row_and_a_sentence():
    good = {name: Outcome("exact", 1e-15) for name in UNDER}
    wrong = {**good, "fsdp2": Outcome("WRONG", 0.1, "wq")}
    refused = {**good, "tensor_parallel": Outcome("refused", note="b folds tokens")}
    other = {**good, "tensor_parallel": Outcome("refused", note="d folds tokens")}
    text = table({"a": good, "b": refused, "c": good, "d": other, "e": wrong, "f": {"": Outcome("", note="no f")}})
    rows = [line for line in text.splitlines() if line.startswith(("| ", "- "))]
    assert rows == [
        "| families | ddp | fsdp2 | simplefsdp | tensor_parallel | expert_parallel |",
        "| a, c | exact | exact | exact | exact | exact |",
        "| b, d | exact | exact | exact | refused | exact |",
        "| e | exact | WRONG | exact | exact | exact |",
        "- b, d: tensor_parallel: FAMILY folds tokens",
        "- e: fsdp2: wq",
        "- f: no FAMILY",
    ]
    assert "6 families, 5 of them train" in text
    assert "off by 1.0e-15" in text


def test_a_page_keeps_what_is_around_the_table(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\n\nold\n\n{END}\n\nafter\n")
    write(page, "| new |")
    assert page.read_text() == f"before\n\n{BEGIN}\n\n| new |\n\n{END}\n\nafter\n"


def test_the_table_is_read_as_it_was_written(tmp_path):
    good = {name: Outcome("exact; attention, vocabulary divided") for name in UNDER}
    refused = {**good, "tensor_parallel": Outcome("refused", note="b folds tokens")}
    found = {"a": good, "b": refused, "c": good, "d": {"": Outcome("", note="no d")}}
    page = tmp_path / "page.md"
    page.write_text(f"| before | it |\n{BEGIN}\n{END}\n| after | it |\n")
    write(page, table(found))
    assert told(page) == {kind: {n: one.said for n, one in found[kind].items()} for kind in "abc"}


@pytest.mark.slow  # it imports every family
@pytest.mark.skipif(not PAGE.exists(), reason="the page is not beside the tests of an installed package")
def test_all_families_of_the_page_are_read():
    """Which are all that transformers has; each of them ends with a sentence, or in a row of the table."""
    text, (found, _, _) = PAGE.read_text(), read(PAGE)
    assert f" {len(found)} families, {len(told(PAGE))} of them train;" in text
    assert f"transformers {version('transformers')}," not in text or {*found} == {*kinds()}
    assert all(by[""].note for by in found.values() if "" in by)


@pytest.mark.slow
def test_the_grid_of_a_few_families(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    command = [sys.executable, str(GRID), "phi3", "hrm_text", "opt", "--write", str(page)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    whole = "exact; attention, feed-forward, vocabulary divided"
    assert f"| phi3 | exact | exact | exact | {whole} | no experts |" in text
    assert f"| opt | exact | exact | exact | {whole}; sequence_parallel=false | no experts |" in text
    assert "- hrm_text: model=transformers cannot train FAMILY: it mixes tokens outside" in text


def test_another_release_says_which_families_end_otherwise():
    exact, refused = {"ddp": Outcome("exact")}, {"": Outcome("not trained", note="it draws numbers")}
    before = {"a": exact, "b": exact}
    first, _, *lines = changed(before, {"a": exact, "b": refused, "c": exact}, "9.9")
    assert first.startswith("transformers 9.9, ")
    assert first.endswith(": 1 of 3 families end as in the table.")
    assert lines == ["- b: ddp exact -> not trained (it draws numbers)", "- c: not there -> ddp exact"]
