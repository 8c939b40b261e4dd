"""torch's fused attention of one stretch of queries to one of keys, with the logarithm of the sums of exponentials.

Scores never exist as a whole (Dao et al., "FlashAttention", arXiv 2205.14135). torch has one operator per device for
this; autograd's own, which `scaled_dot_product_attention` calls, does not return the logarithm.

Shapes: B batch, H heads, S tokens of a stretch, E width of a head.
"""

import functools
from typing import Any

import torch
from torch import Tensor

WIDEST = 256  # head that the GPU's kernels take
HALF = (torch.float16, torch.bfloat16)
BOUND = {torch.float16: 5e-3, torch.bfloat16: 4e-2}  # absolute, of results and gradients near 1


def fits(q: Tensor, v: Tensor) -> bool:
    """Whether the operator of this device takes queries and keys like `q` and values like `v`."""
    if q.shape[-1] != v.shape[-1]:
        return False
    if q.device.type == "cuda":
        return q.dtype in HALF and q.shape[-1] <= WIDEST and q.shape[-1] % 8 == 0
    return q.device.type == "cpu"


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(result, logarithms (B, H, S) in float32 or wider). causal: a query sees the keys up to its own place."""
    aten: Any = torch.ops.aten
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. out, lse: of the queries with all keys, also others than these."""
    aten: Any = torch.ops.aten
    given = dout, q, k, v, out, lse
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, scale=scale)
    seed, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # no dropout
    sizes = None, None, q.shape[2], k.shape[2]  # a tensor in the place of None would mean packed sequences
    return aten._scaled_dot_product_flash_attention_backward(*given, *sizes, 0.0, causal, seed, unused, scale=scale)


@functools.cache
def trouble(device: str) -> str:
    """Why this torch's operators of the device are not used; "" if they compute what `forward` and `backward` say.

    That is tried on a few numbers: they are internal, and a GPU may have none.
    """
    if device == "cpu":
        return ""  # what tests run
    try:
        wrong = [str(dtype).removeprefix("torch.") for dtype in HALF if not _agrees(device, dtype)]
    except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
        return (str(error).splitlines() or [""])[0] or type(error).__name__
    return f"its results in {' and '.join(wrong)} are wrong" if wrong else ""


def _agrees(device: str, dtype: torch.dtype) -> bool:
    generator, shape = torch.Generator().manual_seed(0), (1, 2, 16, 16)
    made = (torch.randn(shape, generator=generator, device="cpu") for _ in range(4))
    q, k, v, dout = (x.to(device, dtype) for x in made)
    out, lse = forward(q, k, v, True, 0.25)
    found = out, lse, *backward(dout, q, k, v, out, lse, True, 0.25)
    wide = [x.float().requires_grad_() for x in (q, k, v)]
    sees = torch.ones(16, 16, dtype=torch.bool, device=device).tril()
    scores = (wide[0] @ wide[1].mT * 0.25).masked_fill(~sees, -torch.inf)
    expected = scores.softmax(-1) @ wide[2]
    gradients = torch.autograd.grad(expected, wide, dout.float())
    pairs = zip(found, (expected, scores.logsumexp(-1), *gradients), strict=True)
    return all(torch.allclose(a.float(), b, rtol=0, atol=BOUND[dtype]) for a, b in pairs)
