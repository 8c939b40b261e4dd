"""Options of fsdp2 that change when memory is held, not what is computed: bitwise equal."""

import pytest

from plait.testing import Trial, train, unequal

OPTIONS = [
    {"reshard_after_forward": "never"},
    {"reshard_after_forward": "always", "reshard_root": True},
    *(pytest.param(x, marks=pytest.mark.slow) for x in ({"prefetch": 1}, {"cpu_offload": True}, {"shard": 2})),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_same_training(plait_ranks, options):
    trial = Trial("tied", dtype="float32")
    plain = plait_ranks.once(train, trial, {"fsdp2": {}}, world=2)
    for rank, result in enumerate(plait_ranks.run(train, trial, {"fsdp2": options}, world=2)):
        assert result.losses == plain[rank].losses
        assert unequal(result.final, plain[rank].final) is None


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({}, "mixed"), ({"reshard_after_forward": "always"}, "float32"), ({"cpu_offload": True}, "float32")],
    ids=str,
)
def test_on_one_rank_it_trains_as_no_strategy_does(plait_ranks, options, dtype):
    """In mixed precision FSDP2 sums the two gradients of a tied parameter in bfloat16, and the core in float32."""
    trial = Trial("tied", dtype=dtype)
    (plain,) = plait_ranks.once(train, trial, {}, world=1)
    (result,) = plait_ranks.run(train, trial, {"fsdp2": options}, world=1)
    assert result.losses == plain.losses
    assert unequal(result.final, plain.final) is None
