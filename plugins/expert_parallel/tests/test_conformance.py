"""expert_parallel keeps the contract."""

import math

from plait.strategies.registry import installed
from plait.testing import Layout, StrategySuite
from plait_testing.models import MODELS

READY = {name for name, plugin in installed().items() if plugin.state == "ok"}
FSDP2, TENSOR = {"fsdp2": {}}, {"fsdp2": {}, "tensor_parallel": {"degree": 2}}
OFF = {"fsdp2": {}, "tensor_parallel": {"degree": 2, "sequence_parallel": False}}
HYBRID = {"fsdp2": {"replicate": 2, "shard": 2}}
LAYOUTS = {
    "tp 4 x ep 4": Layout(4, {"degree": 4}, {"tensor_parallel": {"degree": 4}}),
    "fsdp2 4 x ep 1": Layout(4, {"degree": 1}, FSDP2),
    "fsdp2 4 x ep 2": Layout(4, {"degree": 2}, FSDP2),
    "hsdp 2x2 x ep 2": Layout(4, {"degree": 2}, HYBRID),
    "fsdp2 2 x tp 2, whole sequences, x ep 4": Layout(4, {"degree": 4}, OFF),
    "fsdp2 2 x tp 2 x ep 4": Layout(4, {"degree": 4}, TENSOR),
    "fsdp2 2 x tp 2 x ep 2": Layout(4, {"degree": 2}, TENSOR),
    "fsdp2 2 x ep 2": Layout(2, {"degree": 2}, FSDP2),
}


class TestExpertParallel(StrategySuite):
    strategy = "expert_parallel"
    axes = ("experts", "ep")
    # tried in its last layout; fsdp2 deals the batches
    slow = (
        *StrategySuite.slow,
        *("test_composes_with", "test_a_run_equals", "test_the_loss", "test_mixed", "test_float32"),
        *("test_plain_steps", "test_accumulation", "test_nothing", "test_recomputation"),
    )
    layouts = {name: layout for name, layout in LAYOUTS.items() if set(layout.beside) <= READY}
    refuses = {f"model {model}": "finds no experts in this model" for model in MODELS if model != "moe"}
    run_model = ("model=deepseek_v3_debug", "model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.ffn_dim=48")

    def held(self, shape, axes, degree):
        if "experts" in axes:
            left = degree.get("experts.dp_shard", 1) * degree.get("experts.tp", 1)
            return math.ceil(shape[0] / degree["ep"] / left) * math.prod(shape[1:])
        tp, data = degree.get("tp", 1), degree.get("dp_shard", 1)
        if {"heads", "kv_heads", "ffn", "vocab"} & set(axes):
            return math.prod(shape) // tp // data
        return math.ceil(shape[0] / data) * math.prod(shape[1:])
