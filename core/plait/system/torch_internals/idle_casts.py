"""A pass of inductor's: a sum that is rounded and brought back to its own dtype stays as it is.

A norm's backward rounds the gradient of its weight to the weight's dtype, and backward of the cast that made the weight
bfloat16 brings it back to float32. Inductor rounds nothing between two casts that it joins, so its kernel copies each
number to where it was: four such kernels in every block of Qwen3. Needs `list_mode_options`, `custom_graph_pass` and
`config.emulate_precision_casts` of `torch._inductor`, in torch 2.11 to 2.15. Tests: tests/parallel/test_compile.py.
"""

from typing import Any

import torch
from torch import fx
from torch._inductor import config, list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

CAST, SUM = torch.ops.prims.convert_element_type.default, torch.ops.aten.sum.dim_IntList


class WithoutIdleCasts(CustomGraphPass):
    """Of forward or backward alone: what is kept between the two keeps its dtype."""

    def __call__(self, graph: fx.Graph) -> None:
        if config.emulate_precision_casts:  # then it rounds between the two
            return
        for back in graph.find_nodes(op="call_function", target=CAST):
            there = back.args[0]
            source = there.args[0] if there.target is CAST and len(there.users) == 1 else there
            if source.target is SUM and source.meta["val"].dtype == back.args[1]:
                back.replace_all_uses_with(source)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


PASS = WithoutIdleCasts()


def options_of(mode: str) -> dict[str, Any]:
    """The `options` of `torch.compile` that stand for this mode, with the pass."""
    return {**list_mode_options(mode), "post_grad_custom_pre_pass": PASS}
