"""Keys and values of grouped heads are repeated if no fused kernel takes groups; tests/gpu sees which kernels run."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plait.ops import attention
from plait.ops.attention import CausalAttention, kernel_takes_groups

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
AMPERE, HOPPER, TURING = (8, 0), (9, 0), (7, 5)


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "widths", "takes"),
    [
        (GPU, HOPPER, torch.float32, (128, 128), False),  # the default precision
        (GPU, AMPERE, torch.float32, (64, 64), False),
        (GPU, HOPPER, torch.float64, (64, 64), False),
        (GPU, HOPPER, torch.bfloat16, (128, 128), True),
        (GPU, AMPERE, torch.float16, (128, 128), True),
        (GPU, TURING, torch.float16, (64, 64), False),
        (GPU, HOPPER, torch.bfloat16, (192, 128), True),
        (GPU, AMPERE, torch.bfloat16, (192, 128), False),
        (GPU, HOPPER, torch.bfloat16, (512, 512), False),
        (CPU, TURING, torch.float32, (128, 128), True),
    ],
)
def test_which_groups_a_kernel_takes(device, capability, dtype, widths, takes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert kernel_takes_groups(device, dtype, *widths) is takes


class Heads(TorchDispatchMode):
    """seen: the numbers of query, key and value heads of each attention."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_scaled_dot_product" in func.__name__ and "backward" not in func.__name__:
            self.seen.append([x.shape[1] for x in args[:3]])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("takes", "heads"), [(True, [6, 2, 2]), (False, [6, 6, 6])])
def test_attention_repeats_what_no_kernel_groups(takes, heads, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 9, 4, dtype=torch.float64, generator=generator).requires_grad_() for n in (6, 2, 2))
    expected = CausalAttention()(q, k, v, torch.arange(9).expand(2, 9))  # the path with a mask
    asked = []
    monkeypatch.setattr(attention, "kernel_takes_groups", lambda *how: asked.append(how) or takes)
    with Heads() as modes:
        found = CausalAttention()(q, k, v)
    assert modes.seen == [heads]
    assert asked == [(q.device, torch.float64, 4, 4)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    pairs = zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (found, expected)), strict=True)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)
