"""fsdp2 keeps the contract."""

import math

from plait.testing import Collective, Layout, StrategySuite


class TestFsdp2(StrategySuite):
    strategy = "fsdp2"
    axes = ("dp_replicate", "dp_shard")
    # the suites of pipeline and tensor_parallel try them together
    slow = (*StrategySuite.slow, "test_composes_with[pipeline]", "test_composes_with[tensor_parallel]")
    quick = ("test_two_runs", "test_recomputation_changes_nothing[selective]")
    layouts = {
        "one rank": Layout(1),
        "4 shards": Layout(4),
        "2 copies of 2 shards": Layout(4, {"replicate": 2}),
        "2 shards": Layout(2),
    }

    def held(self, shape, axes, degree):
        return math.ceil(shape[0] / degree["dp_shard"]) * math.prod(shape[1:])

    def collectives(self, size, degree):
        again = [block.elements for block in size.blocks[:-1]]  # gathered once more in backward
        units = len(size.blocks) + (1 if size.uses.tensors > size.tensors else 2)  # embedding and head, tied: one
        return [
            Collective("all_gather", "dp_shard", units + len(again), size.elements + sum(again)),
            Collective("reduce_scatter", "dp_shard", units, size.elements),
            Collective("all_reduce", "dp_replicate", units, size.elements // degree["dp_shard"]),
        ]
