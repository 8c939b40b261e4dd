"""The rank that is planned by default, rank 0, is one that needs the most memory, also if nothing divides evenly."""

import pytest

from plait.host import compose
from plait_plan.engine import plan

RUN = ["model.n_layers=1", "train.local_batch_size=1", "train.seq_len=32", "validation.interval=0"]
UNEVEN = ["model.vocab_size=1003", "model.ffn_dim=333"]
MIXTURE = ["model=deepseek_v3_debug", "model.n_dense_layers=0", "model.vocab_size=1003"]
LAYOUTS = {
    "fsdp2": (3, ["strategy=[fsdp2]", *UNEVEN]),
    "more ranks than rows": (7, ["strategy=[fsdp2]", "model.dim=24", "model.n_heads=4", "model.n_kv_heads=2"]),
    "hsdp": (6, ["strategy=[fsdp2]", "strategy.fsdp2.replicate=2", *UNEVEN]),
    "simplefsdp": (3, ["strategy=[simplefsdp]", *UNEVEN]),
    "tensor parallel": (6, ["strategy=[tensor_parallel,fsdp2]", "model.vocab_size=1004", "model.ffn_dim=334"]),
    "experts": (3, ["strategy=[fsdp2]", *MIXTURE]),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if i else []) for i, name in enumerate(LAYOUTS)]
)
def test_no_rank_needs_more_than_rank_0(layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    node = compose([*RUN, *overrides])
    found = [plan(node, world, rank=rank).memory for rank in range(world)]
    assert len({memory.parameters for memory in found}) > 1  # otherwise this would show nothing
    for memory in found[1:]:
        for kind in ("parameters", "gradients", "optimizer", "peak"):
            assert getattr(memory, kind) <= getattr(found[0], kind)
