"""Bugs of masked tokens that real pipelines had: planted in a copy, each fails a test of plait-data that names it."""

import os
import subprocess
import sys

import pytest

from tests.mutants.planted import ROOT, Mutant

MASKS, TESTS = "plait_data/masks.py", "plugins/data/tests/test_masked.py"
MUTANTS = [
    Mutant(
        "a label is the token that follows",
        MASKS,
        "np.where(chosen, tokens, IGNORE)",
        "np.where(chosen, np.roll(tokens, -1, axis=1), IGNORE)",
        "test_shares_are_those_that_are_asked_for",
        "labels[chosen] == tokens[chosen]",
    ),
    Mutant(
        "tokens in sight count in the loss",
        MASKS,
        "np.where(chosen, tokens, IGNORE)",
        "tokens",
        "test_shares_are_those_that_are_asked_for",
        "assert not",
    ),
    Mutant(
        "each rank hides the same places of its rows",
        MASKS,
        "first + self.rows, f",
        "first + np.arange(len(self.rows)), f",
        "test_every_layout_and_every_batch_size_sees_the_same",
        "equal",
    ),
    Mutant(
        "every sample hides the same places",
        MASKS,
        "first + self.rows, f",
        "0 * (first + self.rows), f",
        "test_an_epoch_later_other_tokens_are_hidden_but_in_validation_the_same",
        "first[row] == second[row]",
    ),
    Mutant(
        "special tokens are hidden",
        MASKS,
        "        chosen &= ~np.isin(tokens, self.never)\n",
        "",
        "test_shares_are_those_that_are_asked_for",
        "not chosen[tokens < 4]",
    ),
    Mutant(
        "what is to stay becomes a random token",
        MASKS,
        "chosen & (how >= masked) & (how < random)",
        "chosen & (how >= masked)",
        "test_shares_are_those_that_are_asked_for",
        "0.1",
    ),
    Mutant(
        "a piece of a word is in sight",
        MASKS,
        "np.take_along_axis(chosen, first, axis=1)",
        "chosen",
        "test_whole_words_are_hidden_together",
        "follows",
    ),
    Mutant(
        "what is held out is hidden anew by each seed",
        MASKS,
        'f"validation masks {name}"',
        'f"validation masks {name} {self._seed}"',
        "test_an_epoch_later_other_tokens_are_hidden_but_in_validation_the_same",
        "validation",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_caught(mutant, tmp_path):
    """Only the package plait_data is copied; the tests run in a process of their own, which imports the copy."""
    source = ROOT / "plugins" / "data" / "src"
    for file in (source / "plait_data").rglob("*"):
        if file.is_file() and file.suffix in (".py", ".yaml", ".typed"):
            place = tmp_path / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
    path = tmp_path / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} has {text.count(mutant.old)} times {mutant.old!r}, not once"
    path.write_text(text.replace(mutant.old, mutant.new))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS, "-k", mutant.test]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert mutant.says in ran.stdout, ran.stdout
