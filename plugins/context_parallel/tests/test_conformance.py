"""context_parallel keeps the contract."""

import math

from plait.strategies.registry import installed
from plait.testing import Layout, StrategySuite

READY = {name for name, plugin in installed().items() if plugin.state == "ok"}
FSDP2, TENSOR = {"fsdp2": {}}, {"fsdp2": {}, "tensor_parallel": {"degree": 2}}
LAYOUTS = {
    "ring cp 4": Layout(4, {"degree": 4, "method": "ring"}, FSDP2),
    "ulysses cp 4": Layout(4, {"degree": 4, "method": "ulysses"}, FSDP2),
    "gather cp 4, contiguous": Layout(4, {"degree": 4, "order": "contiguous"}, FSDP2),
    "ring cp 2 x fsdp2 2": Layout(4, {"degree": 2, "method": "ring", "order": "contiguous"}, FSDP2),
    "ulysses cp 2 x tp 2, contiguous": Layout(4, {"degree": 2, "method": "ulysses", "order": "contiguous"}, TENSOR),
    "gather cp 2 x tp 2": Layout(4, {"degree": 2}, TENSOR),
    "gather cp 2": Layout(2, {"degree": 2}, FSDP2),
}


class TestContextParallel(StrategySuite):
    strategy = "context_parallel"
    axes = ("cp",)
    slow = (  # its last layout; models with the attention of llama3
        *(*StrategySuite.slow, "test_a_run_equals", "test_composes_with", "test_float32"),
        *("test_mixed_precision_stays", "test_plain_steps", "test_nothing"),
        *(f"test_models_equal_one_process[{model}" for model in ("tied", "qk_norm", "odd")),
    )
    quick = ("test_packed_documents",)
    layouts = {name: layout for name, layout in LAYOUTS.items() if set(layout.beside) <= READY}

    def held(self, shape, axes, degree):
        data = degree.get("dp_shard", 1) * degree["cp"]  # fsdp2 shards over these too
        tp = degree.get("tp", 1)
        if tp > 1 and {"heads", "kv_heads", "ffn", "vocab"} & set(axes):
            return math.prod(shape) // tp // data
        return math.ceil(shape[0] / data) * math.prod(shape[1:])
