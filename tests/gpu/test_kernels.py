"""Kernels that families of transformers take from other packages."""

import functools

import pytest
import torch

from plait_transformers.kernels import where_it_can

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")]


@pytest.mark.parametrize(
    ("device", "dtype", "who"),
    [
        ("cuda", torch.bfloat16, "kernel"),
        ("cuda", torch.float32, "kernel"),
        ("cuda", torch.float64, "own"),
        ("cpu", torch.bfloat16, "own"),
    ],
)
def test_a_kernel_computes_on_a_gpu_but_not_in_float64(device, dtype, who):
    @functools.wraps(lambda x: "own")
    def kernel(x):
        return "kernel"

    assert where_it_can(kernel)(torch.ones(1, device=device, dtype=dtype)) == who
