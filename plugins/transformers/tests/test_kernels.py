"""Where packages of fused kernels, such as fla, are installed, families with mixers train as where they are not."""

import sys
from types import ModuleType

import pytest
import torch
from families import built

from plait_transformers.kernels import give_references

pytestmark = pytest.mark.usefixtures("fresh")

KERNELS = {
    "torch_chunk_gated_delta_rule": ("chunk_gated_delta_rule", "fla"),
    "causal_conv1d_fn": (None, "causal_conv1d"),
}


@pytest.fixture
def installed(monkeypatch):
    """What such packages were called with; they refuse what is not on a GPU, as the real ones do."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
    from transformers.models.qwen3_next import modeling_qwen3_next

    calls = []

    def kernel(x, *args, **kwargs):
        calls.append(x)
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

    for name, (function, package) in KERNELS.items():
        held = ModuleType(package)
        setattr(held, function or name, kernel)
        monkeypatch.setitem(sys.modules, package, held)
        own = getattr(modeling_qwen3_next, name)
        while hasattr(own, "__wrapped__"):
            own = own.__wrapped__
        patched = use_kernel_func_from_hub_with_fallback(function or name, package)(own)
        monkeypatch.setattr(modeling_qwen3_next, name, patched)
    return calls


def convolved(device="cpu", **more):
    """What the family's convolution makes of some values in bfloat16."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    give_references(modeling_qwen3_next.Qwen3NextForCausalLM)
    x = torch.arange(12.0, device=device, dtype=torch.bfloat16).view(1, 2, 6)
    return modeling_qwen3_next.causal_conv1d_fn(x, torch.ones(2, 3, device=device, dtype=x.dtype), **more)


def test_the_spec_is_derived_where_kernels_are_installed(installed):
    assert any("linear_attn" in name for name in built("qwen3_next").spec().axes)
    assert not installed


def test_the_familys_own_function_is_not_asked_to_keep_documents_apart(installed):
    assert convolved().tolist()[0][0] == [0, 1, 3, 6, 9, 12]
    with pytest.raises(ValueError, match="Triton"):
        convolved(seq_idx=torch.zeros(1, 6))
