"""The rows that ranks exchange, of shares that are shorter than others, or empty."""

from typing import Any

import pytest
import torch

from plait_zero.share import Share


@pytest.mark.parametrize(("shape", "dim", "ranks"), [((7, 3), 0, 3), ((2, 5), 1, 4), ((5,), 0, 4), ((6, 2), 0, 3)])
def test_rows_hold_the_shares_and_give_them_back(shape, dim, ranks):
    part = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    nothing: Any = None
    length = -(-shape[dim] // ranks)

    def share_of(rank):
        return Share(nothing, ranks, rank, dim, part.shape, length, nothing, (), part.shape, part.stride())

    every = [share_of(rank) for rank in range(ranks)]
    rows = every[0].rows(part)
    assert rows.shape == (ranks, every[0].elements)
    assert rows.sum() == part.sum()
    assert every[0].from_rows(rows).equal(part)
    for rank, share in enumerate(every):
        own = share.own(part)
        assert share.row(own).equal(rows[rank])
        assert share.from_row(rows[rank]).equal(own)
