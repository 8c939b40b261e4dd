"""pipeline keeps the contract."""

import math

from plait.strategies.registry import installed
from plait.testing import Layout, StrategySuite

READY = {name for name, plugin in installed().items() if plugin.state == "ok"}
FSDP2 = {"fsdp2": {}}
LAYOUTS = {
    "pp 1 x fsdp2 2": Layout(2, {"degree": 1}, FSDP2),
    "gpipe pp 2": Layout(2, {"degree": 2, "schedule": "gpipe"}),
    "pp 2 x tp 2": Layout(4, {"degree": 2}, {"fsdp2": {}, "tensor_parallel": {"degree": 2}}),
    "pp 2 x fsdp2 2": Layout(4, {"degree": 2}, FSDP2),
}


class TestPipeline(StrategySuite):
    strategy = "pipeline"
    axes = ("pp",)
    slow = (  # test_steps.py has them in several micro-batches; models whose blocks are those of llama3
        *(*StrategySuite.slow, "test_a_run_equals", "test_composes_with", "test_float32"),
        "test_mixed_precision_stays",
        *(f"test_models_equal_one_process[{model}" for model in ("qk_norm", "mla")),
    )
    quick = ("test_packed_documents",)
    layouts = {name: layout for name, layout in LAYOUTS.items() if set(layout.beside) <= READY}
    refuses = {"model tied": "are one tied weight", "model odd": "are one tied weight"}

    def held(self, shape, axes, degree):
        data, tp = degree.get("dp_shard", 1), degree.get("tp", 1)
        if tp > 1 and {"heads", "kv_heads", "ffn", "vocab"} & set(axes):
            return math.prod(shape) // tp // data
        return math.ceil(shape[0] / data) * math.prod(shape[1:])
