"""Operators that a compiler puts into one kernel go through memory once; nothing else of a plan changes."""

import torch
from torch import nn

from plait_plan.tracing.fused import LOSS, fuse
from plait_plan.tracing.recorder import Recorder
from plait_plan.tracing.where import Where

SIZE = 8 * 8 * 4  # bytes of each tensor of the toy


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        twice = (x * 2).view(64).view(8, 8)  # views interrupt no kernel
        product = twice.sin() @ self.weight
        return (product + twice).relu().exp()


def test_a_kernel_reads_its_inputs_once_and_writes_what_is_used_after_it() -> None:
    model, x = nn.Sequential(Toy(), Toy()), torch.ones(8, 8)
    with torch.no_grad(), Where([model]) as where, Recorder(where, {}) as recorder:
        model(x).sum()
    found = fuse(recorder, {"0": (0, 0), "1": (0, 1)}, False)
    kernels = [(o.name, o.bytes // SIZE) for o in found if o.module and o.bytes]
    block = [
        ("aten::mul", 3),  # reads x; writes twice, which is used later, and the sine
        ("aten::mm", 3),
        ("aten::add", 3),  # reads the product and twice; writes the exponential alone
    ]
    assert kernels == [*block, *block]
    assert sum(o.bytes for o in found) < sum(o.bytes for o in recorder.operators)
    assert sum(o.flops for o in found) == sum(o.flops for o in recorder.operators)
    assert [o.name for o in found] == [o.name for o in recorder.operators]


def recorded_backward(model: nn.Module, x: torch.Tensor, loss) -> tuple[Recorder, list]:
    """A forward, a loss and a backward, and what of them a compiler leaves."""
    with Where([model]) as where, Recorder(where, {}) as recorder:
        recorder.phase = "forward"
        result = model(x)
        recorder.phase = "loss"
        with where.inside(LOSS):
            value = loss(result)
        recorder.phase = "backward"
        value.backward()
    return recorder, fuse(recorder, {"0": (0, 0)}, False)


def test_the_loss_is_one_kernel_in_forward_and_one_in_backward() -> None:
    rows, columns = 8, 64
    model, labels = nn.Sequential(nn.Linear(8, columns, bias=False)), torch.arange(rows)
    recorder, found = recorded_backward(
        model, torch.ones(rows, 8), lambda logits: nn.functional.cross_entropy(logits, labels, reduction="sum")
    )
    kernels = [(o.phase, o.bytes) for o in found if o.module == LOSS and o.bytes]
    assert [phase for phase, _ in kernels] == ["loss", "backward"]
    assert len([o for o in recorder.operators if o.module == LOSS and o.bytes]) > len(kernels)
