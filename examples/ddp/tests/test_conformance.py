"""plait-ddp by the contract of strategies."""

from plait.testing import Collective, Layout, StrategySuite


class TestDdp(StrategySuite):
    strategy = "ddp"
    axes = ("ddp",)
    layouts = {
        "one": Layout(1),
        "four": Layout(4),
        "two": Layout(2, {"degree": 2}),
    }

    def collectives(self, size, degree):
        return [Collective("all_reduce", "ddp", 1, size.elements)]  # all gradients fit into one bucket
