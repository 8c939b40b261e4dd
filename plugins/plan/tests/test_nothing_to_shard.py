"""If no ranks share parameters, a strategy that shards them costs what no such strategy costs: counted in bytes that
operators read and write, by the plan of a step."""

import pytest

from plait.host import check, compose
from plait_plan.tracing.trace import trace

SMALL = (
    "model.dim=64", "model.n_layers=3", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=96", "train.seq_len=64",
    "train.local_batch_size=1", "compile.enabled=false", "validation.interval=0", "launch.device=cpu",
)  # fmt: skip


def moved(strategies, world, *more):
    run = check(compose([f"strategy=[{strategies}]", *SMALL, *more]), world)
    return sum(operator.bytes for operator in trace(run.config, world, 0, 1).operators)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("others", "world"), [("", 1), ("tensor_parallel", 2)])
def test_sharding_over_one_rank_moves_nothing_more(others, world, precision):
    more = (f"precision.param={precision}", *(("strategy.tensor_parallel.degree=2",) if others else ()))
    plain = moved(others, world, *more)
    assert moved(f"fsdp2,{others}" if others else "fsdp2", world, *more) == plain
    wrapped = moved(f"fsdp2,{others}" if others else "fsdp2", world, "strategy.fsdp2.reshard_root=true", *more)
    assert wrapped > 1.05 * plain  # otherwise this would show nothing
