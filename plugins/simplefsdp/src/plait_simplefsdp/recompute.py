"""What backward recomputes or gathers again: tags on the nodes of the joint graph, for torch's partitioner."""

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from plait import SELECTIVE_KEEPS
from plait_simplefsdp.collectives import KINDS, WAIT
from plait_simplefsdp.shard import BUCKET

BLOCK = "plait_block"  # in the metadata of a graph's nodes: the block whose forward they belong to
AGAIN, SAVE = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE


def tag(joint: GraphModule, blocks: list[str], again: set[str], remat: str, fused: bool) -> None:
    """Tag the nodes of forward.

    again: blocks whose parameters backward gathers again. remat: `remat.mode`. fused: the compiler fuses kernels, so
    that the partitioner may recompute untagged nodes that then cost nothing.
    """
    open = remat == "budget" or (fused and remat == "none")
    for node in joint.graph.nodes:
        if node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward" or _is_number(node):
            continue
        where = node.meta.get("custom") or {}
        recompute = _recompute(node, where, again, remat)
        if recompute is None:
            recompute = None if open else False
        if recompute is not None:
            node.meta["recompute"] = AGAIN if recompute else SAVE
            node.meta["ac_graph_id"] = blocks.index(where[BLOCK]) + 1 if where.get(BLOCK) in blocks else 0


def _is_number(node: Node) -> bool:
    """A size, for example: the partitioner knows best."""
    return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _recompute(node: Node, where: dict[str, str], again: set[str], remat: str) -> bool | None:
    """None: the mode decides."""
    if BUCKET in where:
        return where[BUCKET] in again
    if remat == "budget" and node.target in (*KINDS, WAIT):
        return False  # each rank partitions its own graph, and a collective needs all ranks
    if BLOCK not in where or remat in ("none", "budget"):
        return None
    of = node.args[0] if node.target is operator.getitem else node  # each of several results is kept separately
    target: Any = getattr(of, "target", None)
    kept = hasattr(target, "name") and target.name() in SELECTIVE_KEEPS
    return remat == "full" or not kept
