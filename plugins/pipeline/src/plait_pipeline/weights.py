"""Whether torch can give weights their gradients in a second walk, after the stage's input has got its own."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import _backward

TORCH_IS_RIGHT = hasattr(_backward, "_autograd_grad_for_inputs")  # came with the correction of what is said below


def two_walks(outputs: Iterable[Tensor], inputs: Iterable[Tensor], weights: Iterable[Tensor]) -> bool:
    """Whether this stage's backward may be divided.

    The second walk begins at the nodes of the graph where the ways to weights leave the way to the input. torch 2.11
    adds up what came to several outputs of such a node, counts twice what reaches a weight by two of them, and cannot
    begin at a node that is written in Python, as that of the experts' products is.
    """
    if TORCH_IS_RIGHT:
        return True
    groups = _backward.get_param_groups(
        _nodes(inputs), _nodes(weights), _backward.construct_reverse_graph(_nodes(outputs))
    )
    begins = [list(group["intermediates"]) for group in groups]
    return all(len(each) == 1 and _can_begin(each[0]) for each in begins)


def _can_begin(node: Any) -> bool:
    return not isinstance(node, torch._C._FunctionBase) and len(node._input_metadata) == 1


def _nodes(values: Iterable[Tensor]) -> list[Any]:
    return [node for value in values if (node := _backward._get_grad_fn_or_grad_acc(value)) is not None]
