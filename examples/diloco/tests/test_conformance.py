"""DiLoCo by the contract of strategies; its reference is the workers, simulated one after the other."""

from plait.testing import Layout, StrategySuite, Trial, TrialResult


class TestDiLoCo(StrategySuite):
    strategy = "diloco"
    slow = (  # it changes no model, no loss and no batch: fsdp2's suite has the same
        *(*StrategySuite.slow, "test_a_run_equals", "test_float32", "test_the_loss", "test_recomputation"),
        *("test_composes_with", "test_models_equal_one_process", "test_accumulation"),
    )
    axes = ("worker",)
    layouts = {
        "four workers": Layout(4, {"every": 3}),
        "tensor ranks": Layout(4, {"degree": 2, "every": 2}, {"tensor_parallel": {"degree": 2}}),
        "sharded workers": Layout(4, {"degree": 2, "every": 2}, {"fsdp2": {}}),
        # 1.9 times 0.5 of the way: the first step is no longer
        "two workers": Layout(2, {"every": 2, "outer_lr": 0.5}),
    }

    def reference(self, layout: Layout, trial: Trial) -> list[TrialResult]:
        from plait_diloco.reference import simulate

        workers = layout.options.get("degree", layout.world)
        results = simulate(trial, workers, layout.options["every"], layout.options.get("outer_lr", 0.7), 0.9)
        return [results[rank * workers // layout.world] for rank in range(layout.world)]
