"""A stranger's context parallelism, which deals with the core's own hook, computes what one process computes."""

import pytest

from plait.testing import assert_same
from plait_testing.models import llama3, moe
from plait_testing.trial import Trial, train
from tests.helpers import stretches

FSDP2 = {"fsdp2": {}}
CASES = {
    "packed documents, beside fsdp2 2": (Trial(llama3, micro=2, documents=True), FSDP2, 2, 4),
    "four ranks": (Trial(llama3, documents=True), FSDP2, 4, 4),
    "experts, balance loss": (Trial(moe, steps=1), FSDP2, 2, 2),
    "divided tensors": (Trial(llama3), {**FSDP2, "tensor_parallel": {"degree": 2}}, 2, 4),
    "divided experts": (Trial(moe), {**FSDP2, "expert_parallel": {"degree": 2}}, 2, 2),
}
QUICK = ("packed documents, beside fsdp2 2",)


def divided(trial, strategies, degree):
    return train(trial, strategies, [stretches.Stretches(degree)])


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_a_strangers_gather_of_keys_equals_one_process(plait_ranks, case):
    trial, strategies, degree, world = CASES[case]
    expected = plait_ranks.run(train, trial, world=1)[0]
    assert_same(plait_ranks.run(divided, trial, strategies, degree, world=world), expected)
