"""What one rank decides holds for all, and so does its error."""

import torch.distributed as dist

from plait import PlaitError
from plait.parallel.agreement import on_rank_0


def refused():
    def decide():
        error = PlaitError("train.seq_len=3 is odd").at("train.seq_len", 3, (2, 4))
        error.add_note("raised by a strategy")
        raise error

    try:
        on_rank_0(decide)
    except PlaitError as error:
        return str(error), error.key, error.value, error.fits
    return None


def test_an_error_of_rank_0_is_raised_whole_on_all(plait_ranks):
    whole = ("train.seq_len=3 is odd (raised by a strategy)", "train.seq_len", 3, (2, 4))
    assert plait_ranks.run(refused, world=2) == [whole, whole]


def decided():
    return on_rank_0(lambda: ("of", dist.get_rank()))


def test_rank_0_decides_for_all(plait_ranks):
    assert plait_ranks.run(decided, world=2) == [("of", 0), ("of", 0)]
