"""The operators of a GPU in a trace, whose tensors are a CPU's: what torch runs there as one operator is one here.

On a CPU RMSNorm is six operators, which keep five results for backward, and attention whose values have another width
than its keys is products, which keep all scores.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from plait import Cluster, Config

WORKSPACES = 2**26  # bytes that torch keeps for cuBLAS and cuBLASLt on an H100, on other GPUs fewer

FUSED_NORM = hasattr(torch.ops.aten, "_fused_rms_norm")  # from torch 2.9
_rms_norm, _attention = F.rms_norm, F.scaled_dot_product_attention


def planned_device(config: Config) -> str:
    """ "cuda" or "cpu": of the cluster that the run is planned for, otherwise of the run."""
    cluster, wanted = Cluster.of(config.cluster), config.launch.device
    if cluster:
        return cluster.device
    return "cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu"


@contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Inside, functions of torch run the operators that they would run on `device`."""
    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(mock.patch.object(F, "rms_norm", rms_norm))
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
        yield


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Its operator on a GPU keeps its input and a number for each row; a CPU has none like it but that of LayerNorm."""
    if not FUSED_NORM or (weight is not None and weight.dtype != x.dtype):
        return _rms_norm(x, shape, weight, eps)
    return torch.ops.aten.native_layer_norm(x, list(shape), weight, None, eps or 1e-6)[0]


def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A GPU has a kernel for values of another width, too, which keeps its result and a number for each query. It has
    none for grouped heads in other dtypes than half precision, so `CausalAttention` repeats keys and values there."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    if kwargs.get("enable_gqa") and not half and k.shape[1] < q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    whole = q.shape[1] == k.shape[1] and not args and kwargs.get("attn_mask") is None
    if v.shape[-1] == q.shape[-1] or not whole or not half:
        return _attention(q, k, v, *args, **kwargs)
    aten: Any = torch.ops.aten
    causal, scale = kwargs.get("is_causal", False), kwargs.get("scale")
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)[0]
