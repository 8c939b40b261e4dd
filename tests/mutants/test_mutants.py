"""Every planted bug fails the one test of the suite that names it.

Without a bug these tests pass: the suite itself shows it for the source, and the first one here for a copy.
"""

import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

from plait_testing.pool import RankError
from tests.mutants.mutants import MUTANTS
from tests.mutants.planted import ROOT, Planted, copied

FILES = {
    "fsdp2": "plugins/fsdp2",
    "ddp": "examples/ddp",
    "tensor_parallel": "plugins/tensor_parallel",
    "context_parallel": "plugins/context_parallel",
    "expert_parallel": "plugins/expert_parallel",
    "pipeline": "plugins/pipeline",
    "simplefsdp": "plugins/simplefsdp",
    "lora": "plugins/lora",
    "local_sgd": "examples/local_sgd",
    "float8": "examples/float8",
    "zero": "plugins/zero",
    "muon": "plugins/muon",
    "soap": "plugins/muon",
    "diloco": "examples/diloco",
}


def suite(strategy):
    """The own conformance class of the strategy, or optimizer."""
    name = f"conformance_of_{strategy}"
    if name not in sys.modules:
        files = [ROOT / FILES[strategy] / "tests" / f"test_{which}.py" for which in ("conformance", strategy)]
        spec = importlib.util.spec_from_file_location(name, next(file for file in files if file.exists()))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    (cls,) = [value for key, value in vars(sys.modules[name]).items() if key.startswith("Test")]
    return cls()


def ask(mutant, ranks, folder, folders):
    folder.mkdir()
    test = getattr(suite(mutant.strategy), mutant.test)
    given = {"tmp_path": folder, "tmp_path_factory": folders}
    arguments = {name: given[name] for name in inspect.signature(test).parameters if name in given}
    test(plait_ranks=ranks, **mutant.on, **arguments)


FIRST = [next(mutant for mutant in MUTANTS if mutant.strategy == name) for name in ("ddp", "context_parallel")]
MARKED = [m if m in FIRST else pytest.param(m, marks=pytest.mark.slow) for m in MUTANTS]


@pytest.mark.parametrize("mutant", MARKED, ids=lambda mutant: mutant.bug)
def test_caught(plait_ranks, tmp_path, tmp_path_factory, mutant):
    if mutant is FIRST[0]:
        ask(mutant, Planted(plait_ranks, copied(tmp_path / "twin")), tmp_path / "unchanged", tmp_path_factory)
    planted = Planted(plait_ranks, copied(tmp_path / "copy", mutant), mutant.timeout)
    with pytest.raises((AssertionError, RankError), match=re.escape(mutant.says)):
        ask(mutant, planted, tmp_path / "changed", tmp_path_factory)


def test_every_bug_quotes_code_that_is_there_once():
    sources = [ROOT / "core", *ROOT.glob("plugins/*/src"), *ROOT.glob("examples/*/src")]
    for mutant in MUTANTS:
        (file,) = (source / mutant.file for source in sources if (source / mutant.file).exists())
        assert file.read_text().count(mutant.old) == 1, mutant.bug


def test_the_table_in_the_docs():
    page = (ROOT / "docs" / "testing.md").read_text()
    for mutant in MUTANTS:
        assert f"| {mutant.bug} | `{mutant.test}` |" in page, mutant.bug


def test_the_copy_is_what_runs(plait_ranks, tmp_path):
    places = copied(tmp_path / "copy")
    Path(places[0], "plait", "planted_here.py").write_text("HERE = __file__\n")
    (answer,) = Planted(plait_ranks, places).run(where, world=1)
    assert answer == str(Path(places[0], "plait", "planted_here.py"))


def where():
    from plait.planted_here import HERE

    return HERE
