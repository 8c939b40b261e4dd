"""What a sweep says of itself on the way: the job that begins of how many, the time that is left, the best so far."""

import pytest

from plait.records.ledger import Job
from plait.sweep.standing import best_first, standing


def job(number: int, state: str, loss: float | None = None, val_loss: float | None = None, seconds: float = 0.0) -> Job:
    overrides = [f"train.seed={number}"]
    return Job(number, str(number), state, loss=loss, val_loss=val_loss, seconds=seconds, overrides=overrides)


ONE = job(0, "finished", 2.0, 2.5, 60.0)
BETTER = job(1, "finished", 2.2, 2.4, 120.0)
FAILED = job(2, "failed", 0.1, None, 1.0)
RUNS = job(3, "running", 0.1, 0.1, 1.0)
BEST_IS_BETTER = "; best so far: job 1 (train.seed=1), val_loss 2.4000"


@pytest.mark.parametrize(
    ("jobs", "total", "text"),
    [
        ([FAILED, RUNS], 6, ""),  # nothing has finished
        ([ONE, RUNS], 6, "; about 0:05:00 left; best so far: job 0 (train.seed=0), val_loss 2.5000"),
        ([ONE, BETTER, FAILED, RUNS], 6, f"; about 0:04:30 left{BEST_IS_BETTER}"),
        ([ONE, BETTER, RUNS, job(4, "running")], 7, f"; about 0:04:30 left{BEST_IS_BETTER}"),  # five, two at once
        ([ONE, BETTER], 2, BEST_IS_BETTER),
        ([ONE, BETTER, RUNS], None, BEST_IS_BETTER),  # a search
        ([job(0, "finished", 1.5, None, 1.0)], 1, "; best so far: job 0 (train.seed=0), loss 1.5000"),
        ([job(0, "finished", None, None, 1.0)], 1, ""),
    ],
)
def test_how_it_stands(jobs: list[Job], total: int | None, text: str) -> None:
    assert standing(jobs, total) == text


def test_the_best_comes_first_and_what_has_no_loss_in_its_own_order() -> None:
    nothing = job(5, "finished")
    assert best_first([FAILED, ONE, nothing, BETTER, RUNS]) == [BETTER, ONE, FAILED, nothing, RUNS]
