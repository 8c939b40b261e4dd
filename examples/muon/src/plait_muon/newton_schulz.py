"""The orthogonal matrix next to a matrix, roughly, by Newton-Schulz iteration; of a sharded one that of the whole.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", kellerjordan.github.io/posts/muon.

Shapes: N matrices, R rows, C columns, S the shorter of the two sides.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

# Of a polynomial that is steep at 0: five iterations bring singular values from 0.01 on to between 0.7 and 1.2.
A, B, C = 3.4445, -4.7750, 2.0315
SMALLEST = 1e-7  # what a norm counts as at least: zeros stay zeros


def newton_schulz(x_NRC: Tensor, iterations: int) -> Tensor:
    """`x_NRC`, with the singular values of each matrix brought near to 1."""
    if x_NRC.shape[-2] > x_NRC.shape[-1]:
        return newton_schulz(x_NRC.mT, iterations).mT  # products as large as the shorter side
    x_NSC = x_NRC / x_NRC.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST)
    for _ in range(iterations):
        gram_NSS = x_NSC @ x_NSC.mT
        step_NSS = torch.baddbmm(gram_NSS, gram_NSS, gram_NSS, beta=B, alpha=C)
        x_NSC = torch.baddbmm(x_NSC, step_NSS, x_NSC, beta=A)
    return x_NSC


def orthogonal(updates: Sequence[Tensor], like: Tensor, iterations: int) -> list[Tensor]:
    """What this rank holds of the `newton_schulz` of each update.

    updates: what this rank holds of them. Whole they are as large as the parameter `like`, and placed as it is: a
    matrix, or the stacked matrices of experts, then one update. If that is a DTensor, every rank of its mesh computes
    some of the matrices, whole, and gets its part of the others' results. Collective over the mesh then.
    """
    local_NRC = torch.stack([*updates]) if like.dim() == 2 else updates[0]
    if not isinstance(like, DTensor):
        result_NRC = newton_schulz(local_NRC, iterations)
    else:
        rows, columns = like.shape[-2:]
        how: Any = {"shape": torch.Size((len(updates), rows, columns)) if like.dim() == 2 else like.shape}
        how |= {"device_mesh": like.device_mesh, "stride": (rows * columns, columns, 1), "run_check": False}
        placements = [stacked(p) for p in like.placements] if like.dim() == 2 else like.placements
        each_whole = [Shard(0)] * like.device_mesh.ndim
        given = DTensor.from_local(local_NRC, placements=placements, **how).redistribute(placements=each_whole)
        own_NRC = newton_schulz(given.to_local(), iterations).contiguous()
        result = DTensor.from_local(own_NRC, placements=each_whole, **how).redistribute(placements=placements)
        result_NRC = result.to_local()
    return [*result_NRC] if like.dim() == 2 else [result_NRC]


def stacked(placement: Any) -> Any:
    """What the `placement` of a matrix is of a stack of them, whose first dim is another one."""
    if placement.is_replicate():
        return placement
    factor = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}  # shard of a shard
    return type(placement)(placement.dim + 1, **factor)
