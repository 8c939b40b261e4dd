"""What ranks computed, beside one process: which answers follow, and what answers nothing. No ranks are started."""

from typing import Any

import attrs
import pytest
import torch

from plait.testing import Comparison
from plait_testing.foreign.asked import PLAIN, answers
from plait_testing.foreign.bisected import Diverged, first_apart
from plait_testing.foreign.rounding import Bounds
from plait_testing.foreign.runs import Ran, Variant

NOTHING: Any = None
TP = Comparison(build=NOTHING, parallelize=NOTHING, batch=NOTHING, mesh={"tp": 2})
DP = attrs.evolve(TP, mesh={"dp": 2})
WEIGHT = {"weight": torch.ones(2, dtype=torch.float64)}
MOVED = {"weight": torch.zeros(2, dtype=torch.float64)}
RIGHT = Ran(
    **{"initial": WEIGHT, "gradients": WEIGHT, "clipped": WEIGHT, "losses": [1.0], "norms": [2.0]},
    **{"final": MOVED, "restored": MOVED, "later": MOVED, "order": ["weight"]},
)


def status(variant, ranks):
    return {
        answer.key: (answer.status, answer.skipped or answer.raised)
        for answer in answers(TP, variant, RIGHT, ranks, Bounds())
    }


def test_ranks_that_compute_what_one_process_does():
    found = status(Variant(PLAIN), [RIGHT, RIGHT])
    assert found == dict.fromkeys(("initial", "loss", "gradients", "norm", "steps", "saved"), ("ok", ""))


@pytest.mark.parametrize(
    ("what", "key", "said"),
    [
        ("unasked", "recomputation", "skipped"),
        ("unclipped", "norm", "skipped"),
        ("unkept", "saved", "skipped"),
        ("unsaved", "saved", "wrong"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_question_that_one_rank_cannot_answer_is_not_answered(what, key, said, rank):
    """Ranks of a pipeline have other models: one may have nothing to recompute."""
    ranks = [RIGHT, RIGHT]
    ranks[rank] = attrs.evolve(RIGHT, **{what: "no list of modules"})
    variant = Variant(key if what == "unasked" else PLAIN)
    assert status(variant, ranks)[key] == (said, "no list of modules")


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        ("initial", {"initial", "steps", "saved"}),
        ("gradients", {"gradients"}),
        ("clipped", {"norm"}),
        ("final", {"steps", "saved"}),
        ("restored", {"saved"}),
        ("later", {"saved"}),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_wrong_on_one_rank_is_wrong(what, wrong, rank):
    ranks = [RIGHT, RIGHT]
    ranks[rank] = attrs.evolve(RIGHT, **{what: {"weight": WEIGHT["weight"] / 2}})
    assert {key for key, (said, _) in status(Variant(PLAIN), ranks).items() if said == "wrong"} == wrong


def test_a_wrong_loss_is_told_where_only_it_is_wrong():
    louder = attrs.evolve(RIGHT, losses=[1.5], norms=[3.0])
    assert status(Variant(PLAIN), [louder, louder])["norm"] == ("wrong", "")
    (answer,) = answers(TP, Variant("unequal"), RIGHT, [louder, louder], Bounds())
    assert (answer.key, answer.status) == ("unequal", "wrong")
    assert answer.finding.at.startswith("the loss, ")
    bent = attrs.evolve(louder, gradients={"weight": WEIGHT["weight"] / 2})
    (answer,) = answers(TP, Variant("unequal"), RIGHT, [louder, bent], Bounds())
    assert answer.finding.at == "weight"


UP = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
DOWN = 2 * UP


def activations(*ranks, of=TP):
    """The first of them that are not those of one process; `up` is right on all ranks."""
    ups = UP.chunk(2) if of is DP else (UP, UP)
    outputs = [{"up": up, "down": each} for up, each in zip(ups, ranks, strict=True)]
    return first_apart(of, {"up": UP, "down": DOWN}, {"up": "Linear", "down": "Linear"}, outputs, 1e-6)


def test_where_outputs_differ_and_how_far():
    left, right = DOWN.chunk(2, -1)
    assert activations(DOWN, DOWN) is None
    assert activations(DOWN / 4, 3 * DOWN / 4) is None  # summands
    assert activations(left, right) is None
    assert activations(left, left).before == "up"
    assert activations(0 * DOWN, 0 * DOWN) == Diverged("down", "Linear", "up", 0, 1.0)
    louder = activations(DOWN, 1.5 * DOWN)
    assert (louder.module, louder.before, louder.rank) == ("down", "up", 1)
    assert louder.off == pytest.approx(0.5)


def test_each_data_rank_has_its_rows():
    first, second = DOWN.chunk(2)
    assert activations(first, second, of=DP) is None
    assert activations(first, first, of=DP).rank == 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("other", [0 * DOWN, DOWN.chunk(2, -1)[0]], ids=["whole", "a part"])
def test_outputs_of_other_shapes_say_nothing(rank, other):
    """Of one rank, such as one that pads: nothing says what is wrong."""
    ranks = [other, other]
    ranks[rank] = torch.zeros(5, 6)
    assert activations(*ranks) is None
