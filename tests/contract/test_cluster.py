"""Figures of a machine: one that cannot be is refused by its key."""

import re

import attrs
import pytest

from plait.contract.cluster import Cluster
from plait.contract.errors import PlaitError

H100 = attrs.asdict(Cluster.shipped()["h100"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory", 0.0), ("bandwidth", 0.0), ("node", 0), ("device", "tpu"), ("reserved", -1.0), ("granularity", 0),
        ("launch", -1e-6), ("inside", {"bandwidth": 0.0, "latency": 0.0}),
        ("between", {"bandwidth": 1.0, "latency": -1e-6}),
        ("achieved", {"products": [0.5, 0.4], "memory": [0.5, 0.6], "links": [0.5, 0.6]}),
        ("achieved", {"products": [0.5, 0.6], "memory": [0.0, 0.6], "links": [0.5, 0.6]}),
        ("achieved", {"products": [0.5, 0.6], "memory": [0.5, 0.6], "links": [0.5, 1.1]}),
    ],
)  # fmt: skip
def test_a_figure_that_cannot_be_is_refused(key, value):
    assert Cluster.of(H100).name
    with pytest.raises(PlaitError, match=re.escape(f"cluster.{key}")):
        Cluster.of({**H100, key: value})


def test_nothing_but_the_cost_of_a_launch_and_what_is_reserved_may_be_zero():
    free = Cluster.of({**H100, "launch": 0.0, "reserved": 0.0})
    assert (free.launch, free.reserved) == (0, 0)
