"""On how many ranks `plait verify` runs, unless it is told."""

from types import SimpleNamespace

import pytest

from plait import PlaitError
from plait_testing.verify import _fewest


@pytest.mark.parametrize(("degrees", "enough", "ranks"), [([-1, 3], 6, 6), ([-1, 3], 12, 12), ([3, 1], 12, 3)])
def test_ranks_are_added_until_the_views_fit(degrees, enough, ranks):
    def layout_for(world):
        if world < enough:
            raise PlaitError("a view needs more")

    assert _fewest(SimpleNamespace(degrees_for=lambda world: degrees, layout_for=layout_for)) == ranks
