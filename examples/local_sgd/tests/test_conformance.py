"""Local SGD by the contract of strategies; its reference is the workers, simulated one after the other."""

from plait.testing import Collective, Layout, StrategySuite, Trial, TrialResult


class TestLocalSgd(StrategySuite):
    strategy = "local_sgd"
    slow = (  # it changes no model, no loss and no batch: fsdp2's suite has the same
        *(*StrategySuite.slow, "test_a_run_equals", "test_float32", "test_the_loss", "test_recomputation"),
        "test_composes_with",
        *(f"test_models_equal_one_process[{model}" for model in ("qk_norm", "mla", "odd")),
    )
    axes = ("worker",)
    layouts = {
        "every step": Layout(2, {"every": 1}),
        "four workers": Layout(4, {"every": 3}),
        "sharded workers": Layout(4, {"degree": 2, "every": 2}, {"fsdp2": {}}),
        "two workers": Layout(2, {"every": 2}),
    }

    def reference(self, layout: Layout, trial: Trial) -> list[TrialResult]:
        from plait_local_sgd.reference import simulate

        workers = layout.options.get("degree", layout.world)
        results = simulate(trial, workers, layout.options["every"])
        return [results[rank * workers // layout.world] for rank in range(layout.world)]

    def collectives(self, size, degree):
        """Workers meet between steps; within one there is no word among them, only fsdp2's inside of each."""
        if "dp_shard" not in degree:
            return []
        units = len(size.blocks) + (1 if size.uses.tensors > size.tensors else 2)  # embedding and head, tied: one
        gathers = Collective("all_gather", "dp_shard", units + len(size.blocks) - 1)
        return [gathers, Collective("reduce_scatter", "dp_shard", units, size.elements)]
