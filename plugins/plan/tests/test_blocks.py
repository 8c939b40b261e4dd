"""Few blocks stand for all: the same figures as with every block traced."""

import attrs
import pytest
from torch import nn

from plait import ModelSpec
from plait.host import compose
from plait_plan.engine import plan
from plait_plan.tracing.blocks import groups
from plait_plan.tracing.recorder import Operator
from plait_plan.tracing.trace import StepTrace
from plait_plan.whole import LEAST, whole

SMALL = ["train.local_batch_size=2", "train.seq_len=32", "model.n_layers=6", "validation.interval=0", "cluster=cpu"]
DEEP = ["model=deepseek_v3_debug", "model.n_dense_layers=2", "model.n_layers=8"]
LAYOUTS = {
    "fsdp2": ["strategy=[fsdp2]"],
    "hsdp": ["strategy=[fsdp2]", "strategy.fsdp2.replicate=2"],
    "prefetch": ["strategy=[fsdp2]", "strategy.fsdp2.prefetch=2", "model.n_layers=8"],
    "full": ["strategy=[fsdp2]", "remat.mode=full"],
    "mixed": [
        "strategy=[fsdp2]",
        "model.n_layers=14",
        "remat.blocks={layers.0: full, layers.1: full, layers.2: full, "
        "layers.3: full, layers.4: full, layers.5: full, layers.6: full}",
    ],
    "selective": ["strategy=[fsdp2]", "remat.mode=selective"],
    "tp": ["strategy=[tensor_parallel,fsdp2]"],
    "simplefsdp": ["strategy=[simplefsdp]"],
    "accumulated": ["strategy=[fsdp2]", "train.global_batch_size=32"],
    "experts": ["strategy=[expert_parallel,fsdp2]", *DEEP],
    "everything": ["strategy=[expert_parallel,tensor_parallel,fsdp2]", *DEEP],
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if i else []) for i, name in enumerate(LAYOUTS)]
)
def test_few_blocks_give_what_all_blocks_give(layout: str) -> None:
    node = compose([*SMALL, *LAYOUTS[layout]])
    few, all_ = plan(node, 4), plan(node, 4, every=True)
    assert few.traced[0] < few.traced[1] == all_.traced[0]
    assert few.memory.reserved == pytest.approx(all_.memory.reserved, rel=0.1)  # blocks of memory leave other gaps
    assert _without_time(few) == _without_time(all_)
    ahead = layout == "prefetch"  # how long a gather two blocks ahead is waited for is no sum over blocks
    assert few.time.step == pytest.approx(all_.time.step, rel=1e-5 if ahead else 1e-9)


@pytest.mark.slow
def test_what_joins_gradients_of_several_blocks_is_traced_with_all() -> None:
    """ddp sums gradients in buckets: how many there are does not just grow with the blocks."""
    found = plan(compose([*SMALL, "strategy=[ddp]", "strategy.ddp.bucket_mb=4"]), 4)
    assert found.traced == (6, 6)


def _without_time(found: object) -> dict[str, object]:
    values = attrs.asdict(found)
    del values["time"], values["traced"], values["memory"]["reserved"]
    return values


def traced(blocks: int, more_in_first: str = "", more_outside: str = "") -> StepTrace:
    """Each block multiplies once; with a further block, the first one or what is outside does something more."""
    modules = [f"layers.{i}" for i in range(blocks)]
    more = [(modules[0], more_in_first)] * (blocks > LEAST) + [("", more_outside)] * (blocks > LEAST)
    calls = [(module, "aten::mm") for module in modules] + [call for call in more if call[1]]
    operators = [
        Operator("forward", 0, module, name, 10, 10, "float32", "all_reduce" if name == "c10d::sum" else "", "a")
        for module, name in sorted(calls)
    ]
    places = {module: (0, i) for i, module in enumerate(modules)}
    return StepTrace(operators, [], places, [], (1, 1), {}, (), None, [1] * len(operators))


@pytest.mark.parametrize(
    ("more", "few"),
    [
        ({}, True),
        ({"more_outside": "aten::add"}, True),  # such as one more counter that is read
        ({"more_outside": "c10d::sum"}, False),
        ({"more_in_first": "aten::add"}, False),
        ({"more_in_first": "c10d::sum"}, False),
    ],
)
def test_all_blocks_are_traced_if_a_further_one_changes_what_others_do(more: dict[str, str], few: bool) -> None:
    found = whole(lambda several: (traced(counts[0] if counts else 12, **more) for counts in several), [12])
    assert (len(found.base.places) == LEAST) is few
    assert len(found.base.places) in (LEAST, 12)


class Numbered(nn.Module):
    """Knows its place, as transformers' layers do, and a width."""

    def __init__(self, place: int, width: int) -> None:
        super().__init__()
        self.layer_idx, self.width = place, width


@pytest.mark.parametrize(
    ("widths", "alike"),
    [([7] * 8, [8]), ([7, 1, 7, 7, 7, 7, 7, 7], [7, 1]), ([0, 1, 2, 3, 3, 5, 6, 7], [1, 1, 1, 2, 1, 1, 1])],
)
def test_a_number_that_is_the_place_of_each_block_is_no_difference(widths: list[int], alike: list[int]) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(Numbered(place, width) for place, width in enumerate(widths))
    found = groups(model, ModelSpec(axes={}, blocks=["layers.*"]))
    assert [len(group.fqns) for group in found] == alike
