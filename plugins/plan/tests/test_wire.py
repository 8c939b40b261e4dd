"""A plan counts the bytes that travel in a wire form, and ranks send as many."""

import pytest

from plait.host import check, compose
from plait_plan.engine import plan
from tests.helpers import measured

RUN = ["checkpoint.enabled=false", "validation.interval=0", "metrics.tensorboard=false", "model.n_layers=3"]


def planned(*overrides):
    """(the checked run on 4 ranks, its plan, the bytes that are gathered)."""
    checked = check(compose([*RUN, *overrides]), 4)
    found = plan(checked.config, 4)
    (gathered,) = (c for c in found.collectives if (c.axis, c.kind) == ("dp_shard", "all_gather"))
    return checked, found, gathered.bytes


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_weights_travel_as_one_byte_an_element(dtype, size):
    checked, _, plain = planned("strategy=[fsdp2]", f"precision.param={dtype}")
    matrices = [s for fqn, s in checked.shapes.items() if fqn.startswith("layers.0.") and len(s) == 2]
    elements, rows = sum(s[0] * s[1] for s in matrices), sum(s[0] for s in matrices)
    times = 2 * 3 - 1  # of each block, but of the last backward gathers nothing again
    _, _, sent = planned("strategy=[float8,fsdp2]", f"precision.param={dtype}")
    assert plain - sent == times * ((size - 1) * elements - 4 * rows)  # with a scale for each row
    _, _, whole = planned("strategy=[float8,fsdp2]", f"precision.param={dtype}", "strategy.float8.gather=false")
    assert plain - whole == times * -4 * rows


@pytest.mark.slow  # other dtypes: test_measured.py
@pytest.mark.parametrize("claimant", ["fsdp2", "simplefsdp"])
def test_ranks_send_what_the_plan_says(plait_ranks, claimant):
    checked, found, _ = planned(f"strategy=[float8,{claimant}]")
    real = plait_ranks.run(measured.measure, checked.config, True, world=4)[0]
    sent = {}
    for kind, axis, size in real.collectives:
        sent[axis, kind] = sent.get((axis, kind), 0) + size
    assert {(c.axis, c.kind): c.bytes for c in found.collectives} == sent
    assert found.memory.parameters == real.parameters
