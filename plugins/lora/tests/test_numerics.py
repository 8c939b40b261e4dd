"""Adapters compute what they say, in every layout: gradients in float64 against one process, B not zero."""

from fnmatch import fnmatch

import attrs
import pytest

from plait import hookimpl
from plait.ops import Normal
from plait.testing import Trial, assert_same, train
from plait_models.llama3 import Llama3

OPTIONS = {"rank": 3, "alpha": 12.0, "targets": ["heads", "kv_heads", "ffn"]}
EXPERTS = {**OPTIONS, "targets": ["heads", "ffn"]}
TINY = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "max_seq_len": 64, "vocab_size": 64}
TENSOR, FSDP2 = {"tensor_parallel": {"degree": 2}}, {"fsdp2": {}}
WHOLE = {"tensor_parallel": {"degree": 2, "sequence_parallel": False}}
QUICK = [
    ("flat", 2, WHOLE),
    ("moe", 2, {"expert_parallel": {"degree": 2}, **FSDP2}),
    ("llama3", 2, {"simplefsdp": {}}),
]
MORE = [
    ("llama3", 4, {**FSDP2, **TENSOR}),
    ("llama3", 2, FSDP2),
    ("llama3", 2, TENSOR),
    ("odd", 2, WHOLE),
    ("llama3", 4, {"tensor_parallel": {"degree": 4}}),  # more ranks than key and value heads
    ("moe", 2, TENSOR),
    ("moe", 4, {**FSDP2, **TENSOR, "expert_parallel": {"degree": 2}}),
    ("flat", 2, TENSOR),
    ("llama3", 2, {"pipeline": {}}),
    ("llama3", 2, {**FSDP2, "context_parallel": {}}),
    ("llama3", 2, {"ddp": {}}),
    ("mla", 2, TENSOR),
    ("moe", 2, WHOLE),
    ("moe", 2, {"simplefsdp": {}}),
    ("moe", 2, {"expert_parallel": {"degree": 2}, "simplefsdp": {}}),
    ("moe", 2, {"pipeline": {}}),
]
LAYOUTS = [*QUICK, *(pytest.param(*layout, marks=pytest.mark.slow) for layout in MORE)]


class Flat(Llama3):
    """Its feed-forwards are no branches: adapters stand beside divided matrices on the stream."""

    def spec(self):
        return attrs.evolve(super().spec(), branches=("layers.*.attention",))


def flat():
    return Flat(**TINY)


@attrs.define
class Nudge:
    """Draws B too: beside B = 0 the gradients of A are 0 in every layout."""

    name = "nudge"
    after = ("lora",)
    phase = "model"

    @hookimpl
    def extend(self, spec):
        init = {key: Normal(0.3) if fnmatch(key, "*lora_B") else fill for key, fill in spec.init.items()}
        return attrs.evolve(spec, init=init)


def nudged(trial, strategies):
    return train(trial, strategies, [Nudge()])


@pytest.mark.parametrize(("model", "world", "beside"), LAYOUTS, ids=str)
def test_gradients_equal_one_process(plait_ranks, model, world, beside):
    """Within 1e-10 for each parameter, at the first step and after two of AdamW."""
    trial, options = Trial(flat if model == "flat" else model), EXPERTS if model in ("moe", "mla", "odd") else OPTIONS
    (one,) = plait_ranks.once(nudged, trial, {"lora": options}, world=1)
    assert {name for name in one.gradients if "lora_" not in name} == set()
    assert min(float(grad.norm()) for grad in one.gradients.values()) > 0
    assert_same(plait_ranks.run(nudged, trial, {"lora": options, **beside}, world=world), one)
