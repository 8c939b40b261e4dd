"""A plan that was put together of pieces is compared with a trace of the same run."""

import pytest

from plait import Cluster, planning
from plait.host import check, compose
from plait_plan.pricing.pieces import pieces

RUN = [
    "strategy=[fsdp2]", "cluster=h100", "model.n_layers=5", "train.seq_len=16", "train.local_batch_size=1",
    "validation.interval=0", "launch.device=cpu",
]  # fmt: skip


def needs(*more: str) -> float:
    run = check(compose([*RUN, *more]), 2)
    cluster = Cluster.of(run.config.cluster)
    found = pieces(run.config, run.layout, run.config.strategy, cluster.granularity)
    return planning.needs(run.config, 2, cluster, found)


@pytest.mark.slow
def test_a_batch_that_all_ranks_compute_at_once_is_one_micro_batch_of_each() -> None:
    assert needs("train.global_batch_size=2") == needs()
