"""The orthogonal matrix next to a matrix, roughly, by Newton-Schulz iteration.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", kellerjordan.github.io/posts/muon.

Shapes: N matrices, R rows, C columns, S the shorter of the two sides.
"""

import torch
from torch import Tensor

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


def flops(rows: int, columns: int, iterations: int) -> int:
    """Floating point operations of one matrix."""
    short, long = sorted((rows, columns))
    return iterations * 2 * short * short * (2 * long + short)
