"""The backward of a stage in two walks, as torch's schedules divide it.

Needs `stage_backward_input` and `stage_backward_weight` of `torch.distributed.pipelining._backward`, in torch 2.11 to
2.13. Test: tests/system/test_torch_internals.py.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def gradient_of_input(
    result: Tensor, gradients: list[Tensor] | None, stream: Tensor, weights: Iterator[nn.Parameter]
) -> tuple[Any, Any]:
    """The gradient of `stream`, and what `gradients_of_weights` needs to go on."""
    from torch.distributed.pipelining._backward import stage_backward_input

    made, left = stage_backward_input([result], gradients, [stream], weights)
    return made[0], left


def gradients_of_weights(weights: Iterator[nn.Parameter], left: Any) -> None:
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(weights, left)
