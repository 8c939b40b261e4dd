"""simplefsdp keeps the contract."""

import math

from plait.testing import Collective, Layout, StrategySuite


class TestSimpleFsdp(StrategySuite):
    strategy = "simplefsdp"
    axes = ("dp_replicate", "dp_shard")
    # It deals batches as fsdp2 does, and test_same_as_fsdp2.py asks for more than nearness in float32.
    slow = (
        *StrategySuite.slow,
        *(
            "test_a_run_equals",
            "test_float32",
            "test_the_loss_by_chunks",
            "test_plain_steps",
            "test_nothing",
            "test_keeps_to",
        ),
        *(f"test_models_equal_one_process[{m}" for m in ("qk_norm", "tied")),
    )
    layouts = {
        "one rank": Layout(1),
        "4 shards": Layout(4),
        "2 copies": Layout(2, {"shard": 1, "replicate": 2}),
        "2 copies of 2 shards": Layout(4, {"replicate": 2}),
        "2 shards": Layout(2),
    }

    def held(self, shape, axes, degree):
        return math.ceil(shape[0] / degree["dp_shard"]) * math.prod(shape[1:])

    def collectives(self, size, degree):
        """Without a graph nothing is joined, and nothing is freed before backward."""
        return [
            Collective("all_gather", "dp_shard", size.tensors, size.elements),
            Collective("reduce_scatter", "dp_shard", size.tensors, size.elements),
            Collective("all_reduce", "dp_replicate", size.tensors, size.elements // degree["dp_shard"]),
        ]
