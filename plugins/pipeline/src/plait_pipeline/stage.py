"""A stage of torch's pipelines, and whether its backward may be divided. The only file that uses what torch keeps
private.

Needs `PipelineStage._get_init_p2p_neighbors_ops` in torch 2.11 to 2.13; the stages of 2.15 do not greet. Where
`_autograd_grad_for_inputs` of `torch.distributed.pipelining._backward` is missing, as in 2.11, also `fwd_cache` of
stages, that module's functions for groups of parameters, and `torch._C._FunctionBase` and `_input_metadata` of nodes.
Test: plugins/pipeline/tests/test_stage.py.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining import _backward

TORCH_IS_RIGHT = hasattr(_backward, "_autograd_grad_for_inputs")  # came with the correction of what is said below


class Stage(pipelining.PipelineStage):
    """torch's, except for two faults of 2.11.

    It greets stages of its own rank, which gloo refuses. And it would divide the backward of any stage; if that would
    be wrong, weights get their gradients together with the input, in one walk.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        own = dist.get_rank(self.group)
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != own]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: Any = False
    ) -> None:
        if not (TORCH_IS_RIGHT or full_backward or self.is_first or self.dw_runner):  # once per step
            outputs, inputs = self.fwd_cache[bwd_chunk_id]
            divided = two_walks([loss] if self.is_last else outputs, inputs, self.submod.parameters())
            self.dw_builder = None if divided else lambda: lambda: None  # what the second walk has left to do
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


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
