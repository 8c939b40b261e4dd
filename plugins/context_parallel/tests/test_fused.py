"""The trial by which set-up decides whether a device's fused kernels are used."""

import pytest
import torch

from plait_context_parallel import fused


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
    assert not fused.works("meta")
