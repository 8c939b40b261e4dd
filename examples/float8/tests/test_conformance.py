"""plait-float8 by the contract of strategies. Its reference rounds by arithmetic, without float8 and without forms."""

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from plait import hookimpl
from plait.testing import Layout, StrategySuite, train


class TestFloat8(StrategySuite):
    strategy = "float8"
    slow = (  # it changes no parameter, no loss and no batch; the suites of others try it beside these
        *(*StrategySuite.slow, "test_a_run_equals", "test_the_loss", "test_checkpoint", "test_every_token"),
        *("test_clipping", "test_tied", "test_no_rank", "test_composes_with", "test_mixed_precision"),
        *("test_initial", "test_float32", "test_accumulation", "test_recomputation", "test_nothing_is_left"),
        *(f"test_models_equal_one_process[{model}" for model in ("qk_norm", "moe", "tied", "mla", "odd")),
    )
    layouts = {
        "alone": Layout(1),
        "fsdp2": Layout(4, {}, {"fsdp2": {}}),
        "simplefsdp": Layout(2, {}, {"simplefsdp": {}}),
        "weights alone, gathered whole": Layout(2, {"inputs": False, "gather": False}, {"fsdp2": {}}),
        "tensor_parallel and fsdp2": Layout(4, {}, {"tensor_parallel": {}, "fsdp2": {}}),
        "tensor_parallel": Layout(2, {}, {"tensor_parallel": {}}),
    }

    def reference(self, layout, trial):
        return train(trial, {}, [ByHand(layout.options.get("inputs", True))])


@attrs.define
class ByHand:
    """Exact training of one process, whose linear layers in blocks are given a forward that rounds."""

    name, phase = "by_hand", "model"
    inputs: bool

    @hookimpl
    def parallelize(self, model, spec):
        for block in spec.blocks_of(model).values():
            for linear in block.modules():
                if isinstance(linear, nn.Linear):
                    linear.__dict__["forward"] = self.forward_of(linear)

    def forward_of(self, linear):
        def forward(x):
            return F.linear(rounded(x) if self.inputs else x, rounded(linear.weight), linear.bias)

        return forward


def rounded(x):
    """Each row to the nearest multiples of its largest magnitude / 448 that have 4 significant bits, and none below
    2 ** -9."""
    scale = x.detach().abs().amax(-1, keepdim=True) / 448
    units = (x.detach() / scale).float().to(x)  # from which torch rounds to float8
    step = 2.0 ** (torch.frexp(units).exponent.clamp(min=-5) - 4)
    return x + ((units / step).round() * step * scale - x).detach()
