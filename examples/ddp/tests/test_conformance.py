"""plait-ddp by the contract of strategies."""

from plait.testing import Collective, Layout, StrategySuite


class TestDdp(StrategySuite):
    strategy = "ddp"
    slow = (  # it changes no model, no loss and no batch: fsdp2's suite has the same
        *(*StrategySuite.slow, "test_a_run_equals", "test_float32", "test_the_loss", "test_recomputation"),
        "test_composes_with",
        *(f"test_models_equal_one_process[{model}" for model in ("qk_norm", "mla", "odd")),
    )
    axes = ("ddp",)
    layouts = {"one": Layout(1), "four": Layout(4), "two": Layout(2, {"degree": 2})}

    def collectives(self, size, degree):
        return [Collective("all_reduce", "ddp", 1, size.elements)]  # all gradients fit into one bucket
