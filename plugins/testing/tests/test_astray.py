"""What is wrong with a gradient, told from the numbers of all ranks. One process: the numbers are made here."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from plait.testing import Comparison
from plait_testing.foreign.astray import _Seen

NOTHING: Any = None
RANKS, TOKENS, ENTRIES, SMOOTHED = 2, 5, 12, 0.3


def seen(whole, right, values, found):
    comparison = Comparison(build=NOTHING, parallelize=NOTHING, batch=NOTHING, mesh={"tp": RANKS})
    return _Seen(comparison, "what the head returns", whole, right, values, found, 1e-9)


def of_logits():
    """(logits, their gradient for a smoothed loss), in float64."""
    made = torch.Generator().manual_seed(0)
    logits = torch.randn(1, TOKENS, ENTRIES, generator=made, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(ENTRIES, (TOKENS,), generator=made)
    F.cross_entropy(logits[0], labels, label_smoothing=SMOOTHED).backward()
    assert logits.grad is not None
    return logits.detach(), logits.grad


@pytest.mark.parametrize(
    ("each", "times"),
    [
        (SMOOTHED / (ENTRIES / RANKS) - SMOOTHED / ENTRIES, RANKS),
        (SMOOTHED / ENTRIES * (ENTRIES - 1) / (ENTRIES / RANKS - 1) - SMOOTHED / ENTRIES, 11 / 5),
        (0.01, None),
    ],
)
def test_a_rank_takes_its_part_of_the_vocabulary_for_all_of_it(each, times):
    logits, right = of_logits()
    found = (right - each / TOKENS).chunk(RANKS, -1)
    cause = seen(logits, right, logits.chunk(RANKS, -1), found).uniform()
    assert (cause is None) is (times is None)
    assert cause is None or (cause.kind, cause.axis) == ("part of the vocabulary", "tp")
    assert cause is None or cause.factor == pytest.approx(times)


def test_an_error_that_is_not_alike_is_not_of_the_vocabulary():
    logits, right = of_logits()
    assert seen(logits, right, logits.chunk(RANKS, -1), (right * 1.1).chunk(RANKS, -1)).uniform() is None
    bent = right - SMOOTHED / ENTRIES / TOKENS * (1 + logits.softmax(-1) ** 2)
    assert seen(logits, right, logits.chunk(RANKS, -1), bent.chunk(RANKS, -1)).uniform() is None


def test_zeros_that_learn_are_named_if_the_sum_without_them_is_right():
    whole, right = torch.arange(1.0, 9).view(1, 8).double(), torch.linspace(1, 2, 8).view(1, 8).double()
    mine = [torch.arange(8) < 4, torch.arange(8) >= 4]
    values = [whole * own for own in mine]
    found = [torch.where(own, right, torch.full_like(right, 0.5)) for own in mine]
    cause = seen(whole, right, values, found).masked()
    assert cause is not None
    assert (cause.kind, cause.axis) == ("masked places", "tp")
    assert seen(whole, right, values, [2 * each for each in found]).masked() is None
    assert seen(whole, right, [whole, whole], found).masked() is None
