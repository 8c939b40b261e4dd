"""Partitions the joint graph into forward and backward, with torch's min-cut and the tags of `recompute`."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait import budget_config
from plait_simplefsdp.recompute import tag
from plait_simplefsdp.torch_internals import min_cut_rematerialization_partition, partitioner_options

TAKEN = ("num_fwd_outputs", "static_lifetime_input_indices")


def divide(
    joint: GraphModule, inputs: Any, *, blocks: list[str], again: set[str], remat: Any, fused: bool, **arguments: Any
) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward graph of a joint graph. remat: `remat.*` of the run; the rest as in `tag`.

    The default partitioner does not work here: it keeps gathered parameters, whatever the tags say.
    """
    tag(joint, blocks, again, remat.mode, fused)
    given = {key: value for key, value in arguments.items() if key in TAKEN}
    with partitioner_options(budget_config(remat.budget if remat.mode == "budget" else 1.0)):
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **given)
    _tensors_first(forward, backward, given["num_fwd_outputs"])
    return forward, backward


def _tensors_first(forward: GraphModule, backward: GraphModule, results: int) -> None:
    """What forward keeps must be tensors, then objects, then sizes: autograd relies on this order.

    If attention is recomputed, torch adds the state of a generator, and puts it after the objects (meshes).
    """
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    kept = list(output.args[0])
    objects = [node for node in kept[results:] if _is_object(node)]
    if not objects:
        return
    first = kept.index(objects[0])
    tensors = [node for node in kept[first:] if isinstance(node.meta.get("val"), torch.Tensor)]
    rest = [node for node in kept[first:] if node not in tensors]
    output.args = ((*kept[:first], *tensors, *rest),)
    inputs = [node for node in backward.graph.nodes if node.op == "placeholder"]
    start = next(node for node in inputs if _is_object(node))
    for node in inputs[inputs.index(start) :]:
        if node.name.startswith("rng_state"):
            start.prepend(node)
    forward.recompile()
    backward.recompile()


def _is_object(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return type(value).__name__ == "FakeScriptObject"
