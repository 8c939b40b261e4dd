"""Options of fsdp2 that change when memory is held, not what is computed: bitwise equal."""

import pytest

from plait.testing.parity import unequal
from plait.testing.trial import Trial, train

OPTIONS = [
    {"reshard_after_forward": "never"},
    {"reshard_after_forward": "always", "reshard_root": True},
    {"prefetch": 1},
    {"cpu_offload": True},
    {"shard": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_same_training(plait_ranks, options):
    trial = Trial("tied", dtype="float32")
    plain = plait_ranks.run(train, trial, {"fsdp2": {}}, world=2)
    for rank, trace in enumerate(plait_ranks.run(train, trial, {"fsdp2": options}, world=2)):
        assert trace.losses == plain[rank].losses
        assert unequal(trace.final, plain[rank].final) is None
