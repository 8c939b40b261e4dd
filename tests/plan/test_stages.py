"""The plan of a run whose layers are divided, against ranks that train."""

from collections import Counter
from typing import Any

import pytest

from plait.launch.check import check
from plait.launch.compose import resolve
from plait.plan.engine import plan
from plait.strategies.registry import installed
from tests.helpers import measured

CUTS = [name for name, plugin in installed().items() if name == "pipeline" and plugin.state == "ok"]
pytestmark = pytest.mark.skipif(not CUTS, reason="no strategy that divides layers is installed")
RUN = [
    *("checkpoint.enabled=false", "validation.interval=0", "metrics.tensorboard=false", "model.n_layers=5"),
    *("train.local_batch_size=4", "train.seq_len=128"),
]
PASSED = ("send", "recv")
LAYOUTS = {
    "1f1b x fsdp2": (4, ["strategy=[pipeline,fsdp2]", "train.global_batch_size=40"]),
    "interleaved": (2, ["strategy=[pipeline]", "strategy.pipeline.schedule=interleaved_1f1b", "train.global_batch_size=16"]),
    "1f1b": (2, ["strategy=[pipeline]", "train.global_batch_size=16"]),
    "gpipe": (2, ["strategy=[pipeline]", "strategy.pipeline.schedule=gpipe", "train.global_batch_size=16"]),
    "zbv": (2, ["strategy=[pipeline]", "strategy.pipeline.schedule=zbv", "train.global_batch_size=16"]),
    "zero_bubble": (2, ["strategy=[pipeline]", "strategy.pipeline.schedule=zero_bubble", "train.global_batch_size=16"]),
    "interleaved x fsdp2": (4, ["strategy=[pipeline,fsdp2]", "strategy.pipeline.schedule=interleaved_1f1b", "train.global_batch_size=32"]),
    "never": (4, ["strategy=[pipeline,fsdp2]", "strategy.fsdp2.reshard_after_forward=never", "train.global_batch_size=40"]),
    "1f1b 4": (4, ["strategy=[pipeline]", "strategy.pipeline.degree=4", "train.global_batch_size=24"]),
    "tp": (4, ["strategy=[pipeline,tensor_parallel]", "strategy.tensor_parallel.degree=2", "train.global_batch_size=16"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_send_and_store_what_the_plan_says(name: str, plait_ranks: Any) -> None:
    world, more = LAYOUTS[name]
    node = check(resolve([*RUN, *more]), world).config.node
    real = plait_ranks.run(measured.measure, node, True, world=world)
    used = plait_ranks.run(measured.measure, node, False, world=world)
    stages = plan(node, world).stages
    for one in stages.ranks:
        found = plan(node, world, rank=one.rank)
        own = real[one.rank]
        print(one.rank, found.memory.peak / used[one.rank].peak, found.memory.peak, used[one.rank].peak)
        print((found.memory.parameters, found.memory.gradients, found.memory.optimizer), (own.parameters, own.gradients, own.optimizer))
        a = {(c.axis, c.kind): (c.count, c.bytes) for c in found.collectives}
        b = _totals(own.collectives)
        print("OK" if a == b else "DIFFER", sorted(a.items()), sorted(b.items()))
    assert 0


def _totals(collectives: list[tuple[str, str, int]]) -> dict[tuple[str, str], tuple[int, int]]:
    counts, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for kind, axis, size in collectives:
        counts[axis, kind] += 1
        sizes[axis, kind] += size
    return {key: (counts[key], sizes[key]) for key in counts}
