"""`plait verify` finds planted bugs that only documents, micro-batches or steps show, and names the usual cause."""

import attrs
import pytest

from plait.host import compose
from plait_testing import declared
from plait_testing.declared import OfRun
from plait_testing.verify import plan
from tests.mutants.mutants import MUTANTS
from tests.mutants.planted import Mutant, Planted, copied

SMALL = (
    "model.dim=32", "model.n_layers=4", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=48",
    "model.vocab_size=257", "train.seq_len=16",
)  # fmt: skip
TWICE = Mutant(
    "the loss counts twice", "plait/parallel/applied.py", "return value / count", "return 2 * value / count", "", ""
)
BUGS = {mutant.bug: mutant for mutant in MUTANTS}
CASES = {
    "a mask of documents that is left out": (
        "[context_parallel,fsdp2]",
        BUGS["a token sees the document before its own"],
        "Only step 3 is wrong, whose rows are packed documents",
    ),
    "what is divided by the number of micro-batches": (
        "[pipeline]",
        BUGS["gradients are divided by the number of micro-batches"],
        "is something counted twice?",
    ),
    "what is counted twice": ("[fsdp2]", TWICE, "All gradients are 2 times what they should be: is something counted"),
    "a basis that rounding decides": (
        "[fsdp2] optimizer=soap optimizer.every=1",
        BUGS["the basis of factors without full rank is what rounding makes of it"],
        "Gradients are right, and steps are wrong: the optimizer",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_verify_finds(plait_ranks, tmp_path, case):
    overrides, mutant, says = CASES[case]
    checked = plan(compose([*SMALL, *f"strategy={overrides}".split()]))
    layout, config = checked.layout, checked.config
    trial = OfRun(config=config, vocab=257, data_ranks=layout.count("batch"), last=True, micro=2, documents=True)
    ranks = Planted(plait_ranks, copied(tmp_path / "copy"))
    one = attrs.evolve(trial, micro=1)
    for number, places in enumerate((ranks.places, copied(tmp_path / "planted", mutant))):
        (folder := tmp_path / str(number)).mkdir()
        ranks.run(declared.reference, one, {}, folder, world=1)
        under = Planted(plait_ranks, places)
        answers = under.run(declared.compare, trial, dict(config.strategy), folder, world=layout.world_size)
        found = answers[0][0]
        for findings, _ in answers[1:]:
            found = [mine.joined(other) for mine, other in zip(found, findings, strict=True)]
        assert all(finding.fine for finding in found) == (number == 0), found
    assert says in " ".join(declared.meaning(found, documents=True))
