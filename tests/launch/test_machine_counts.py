"""How many machines may train, and how the global batch divides among them."""

import pytest

from plait.host import check, compose
from plait.testing import raises_about

RUN = ["model=llama3_debug", "data=stdlib", "launch.device=cpu", "strategy=[fsdp2]", "train.local_batch_size=2"]
ELASTIC = [*RUN, "launch.nproc_per_node=1"]


@pytest.mark.parametrize(("most", "machines", "samples"), [(4, (1, 2, 4), 8), (6, (1, 2, 3, 4, 6), 12)])
def test_the_global_batch_divides_among_those_that_may_train(most, machines, samples):
    checked = check(compose([*ELASTIC, f"launch.nnodes=1:{most}"]))
    assert (checked.machines, checked.config.train.global_batch_size) == (machines, samples)


def test_the_numbers_that_fit_are_named():
    with raises_about("launch.nnodes", "1:6", (1, 3)):
        check(compose([*ELASTIC, "launch.nnodes=1:6", "train.global_batch_size=6"]))


def test_a_global_batch_that_the_ranks_cannot_share_is_refused_before_they_start():
    with raises_about("train.global_batch_size", 6):
        check(compose([*RUN, "train.global_batch_size=6"]), 2)
