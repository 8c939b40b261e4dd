"""How many rows a plan sends to each of the ranks that share experts."""

import pytest

from plait import planned_split
from plait.contract.planned import crowded


@pytest.mark.parametrize(("total", "parts"), [(0, 3), (7, 1), (8, 4), (9, 4), (11, 4), (2, 5)])
def test_each_gets_its_share_and_the_first_what_is_left(total: int, parts: int) -> None:
    shares = planned_split(total, parts)
    assert (len(shares), sum(shares)) == (parts, total)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] <= 1


def test_in_the_worst_routing_the_first_gets_all() -> None:
    with crowded():
        assert planned_split(9, 4) == [9, 0, 0, 0]
    assert planned_split(9, 4) == [3, 2, 2, 2]
