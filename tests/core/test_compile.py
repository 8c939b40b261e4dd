"""Blocks are compiled one by one, once for all of them, and what is recomputed stays compiled."""

import pytest
import torch
from layouts import FLOAT64, run_layout


def counted(strategies, remat):
    """(graphs compiled, calls of compiled code) over three steps of two blocks."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    counts = {"graphs": 0, "calls": 0}

    def compiler(graph, inputs):
        counts["graphs"] += 1

        def call(*args):
            counts["calls"] += 1
            return graph(*args)

        return make_boxed_func(call)

    torch._dynamo.register_backend(aot_autograd(fw_compiler=compiler), name="counting")
    try:
        run_layout(strategies, steps=3, precision=FLOAT64, compiled="counting", remat=remat)
    finally:
        torch._dynamo.backends.registry._COMPILER_FNS.pop("counting", None)
        torch._dynamo.backends.registry._BACKENDS.pop("counting", None)
    return counts


@pytest.mark.parametrize(("remat", "calls"), [("none", 4), ("full", 6), ("selective", 6)])
@pytest.mark.parametrize("strategies", [{}, {"fsdp2": {}}])
def test_one_forward_and_one_backward_graph_for_all_blocks(pool, strategies, remat, calls):
    for counts in pool.run(counted, strategies, remat, world=2 if strategies else 1):
        assert counts["graphs"] == 2
        assert counts["calls"] == 3 * calls
