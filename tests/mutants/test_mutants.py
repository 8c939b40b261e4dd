"""Every planted bug fails the one test of the suite that names it.

Without a bug these tests pass: the suite itself shows it for the source, and one test per strategy for a copy.
"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from plait.testing.pool import RankError
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
}


def suite(strategy):
    """The strategy's own conformance class."""
    name = f"conformance_of_{strategy}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / FILES[strategy] / "tests" / "test_conformance.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    (cls,) = [value for key, value in vars(sys.modules[name]).items() if key.startswith("Test")]
    return cls()


def ask(mutant, ranks, folder):
    folder.mkdir()
    arguments = {"tmp_path": folder} if "tmp_path" in needs(mutant) else {}
    getattr(suite(mutant.strategy), mutant.test)(plait_ranks=ranks, **mutant.on, **arguments)


def needs(mutant):
    import inspect

    return inspect.signature(getattr(suite(mutant.strategy), mutant.test)).parameters


LONG = {  # their tests take models with experts through every way of running them, or compile
    "every tensor rank sends all rows, so that a token is computed twice",
    "the gradients of experts are divided by the ranks that share them",
    "the gradient of a router is not summed over the ranks that share its tokens",
    "results come back in the order in which experts computed them",
    "a bias is added on every rank, though the ranks' results are summed",
    "the balance of experts is updated from one rank's tokens",
    "recomputation counts the tokens of experts once more",
    "the gradient of a norm is not summed over the ranks that share the sequence",
    "the gradient of a query's norm is not summed over the ranks that share the heads",
    "the validation loss is averaged per rank",
    "a bucket of gradients is scattered as if it were one parameter",
    "the gradients of copies of a shard are not summed",
    "a tied parameter, gathered once, is still there in the next step",
}
FIRST = {mutant.strategy: mutant for mutant in reversed(MUTANTS) if mutant.bug not in LONG}  # one of each is quick
MARKED = [m if m is FIRST.get(m.strategy) else pytest.param(m, marks=pytest.mark.slow) for m in MUTANTS]


@pytest.mark.parametrize("mutant", MARKED, ids=lambda mutant: mutant.bug)
def test_caught(plait_ranks, tmp_path, mutant):
    if mutant is FIRST.get(mutant.strategy):
        ask(mutant, Planted(plait_ranks, copied(tmp_path / "twin")), tmp_path / "unchanged")
    planted = Planted(plait_ranks, copied(tmp_path / "copy", mutant), mutant.timeout)
    with pytest.raises((AssertionError, RankError), match=re.escape(mutant.says)):
        ask(mutant, planted, tmp_path / "changed")


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
