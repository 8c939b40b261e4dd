"""The trial by which set-up decides whether a device's fused kernels are used."""

from contextlib import redirect_stdout
from io import StringIO
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plait_context_parallel import fused
from plait_testing.trial import Trial


@pytest.mark.parametrize("dtype", fused.HALF)
def test_kernels_that_agree_are_used_whatever_the_default_device(dtype):
    with torch.device("meta"):
        assert fused._agrees("cpu", dtype)


@pytest.mark.parametrize("which", range(3))
def test_one_wrong_gradient_is_enough_not_to_use_them(which, monkeypatch):
    right = fused.backward

    def wrong(*given):
        found = list(right(*given))
        found[which] = 1.1 * found[which]
        return found

    monkeypatch.setattr(fused, "backward", wrong)
    assert not fused._agrees("cpu", torch.bfloat16)


def test_a_device_without_kernels_has_none():
    assert fused.trouble("meta") not in ("", "its results in float16 and bfloat16 are wrong")


def test_wrong_results_are_named(monkeypatch):
    monkeypatch.setattr(fused, "_agrees", lambda device, dtype: dtype != torch.bfloat16)
    assert fused.trouble("xpu") == "its results in bfloat16 are wrong"
    fused.trouble.cache_clear()


class Asked(TorchDispatchMode):
    """given: the arguments of each call of an attention operator, by name."""

    def __init__(self):
        super().__init__()
        self.given = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in func.__name__:
            named = zip((each.name for each in func._schema.arguments), args, strict=False)
            self.given.append(dict(named) | (kwargs or {}))
            return tuple(torch.empty_like(x) for x in args[1:4])
        return func(*args, **(kwargs or {}))


def test_the_gpus_kernel_is_not_told_of_packed_sequences():
    """A tensor of sequence starts, even an empty one, selects the kernel for packed sequences: it takes only int32."""
    q, k, v, out, dout = (torch.empty(1, 2, n, 16, device="meta", dtype=torch.bfloat16) for n in (8, 9, 9, 8, 8))
    lse = torch.empty(1, 2, 8, device="meta")
    with Asked() as asked:
        fused.backward(dout, q, k, v, out, lse, True, 0.25)
    (given,) = asked.given
    assert given["cum_seq_q"] is given["cum_seq_k"] is None
    assert (given["max_q"], given["max_k"], given["is_causal"], given["scale"]) == (8, 9, True, 0.25)


def set_up_without_a_kernel():
    """What set-up of each method prints on a device whose kernel fails."""
    found = {}
    for method in ("ring", "gather"):
        with mock.patch.object(fused, "trouble", return_value="no such kernel"), redirect_stdout(StringIO()) as said:
            Trial().apply({"context_parallel": {"degree": 2, "method": method}, "fsdp2": {}})
        found[method] = said.getvalue()
    return found


def test_the_first_rank_says_that_no_kernel_is_used(plait_ranks):
    first, second = plait_ranks.run(set_up_without_a_kernel, world=2)
    assert first["ring"].count("\n") == 1
    assert first["ring"].startswith("context_parallel: method=ring ")
    assert "no such kernel" in first["ring"]
    assert first["gather"] == second["ring"] == ""
