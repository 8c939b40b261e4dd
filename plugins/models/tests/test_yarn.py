"""YaRN by its paper, and what a converter of published weights must permute."""

import cmath
import math

import pytest
import torch

from plait_models.layers import Rope
from plait_models.mla import LatentAttention, Yarn
from plait_testing.models import qk_norm


def test_yarn_by_its_paper():
    """Section 3.2 of arXiv:2309.00071, pair by pair, with the published model's rounding of the two borders."""
    theta, width, yarn = 10_000.0, 64, Yarn(factor=40.0, original_max_seq_len=4096)
    frequencies = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    found = yarn(frequencies).tolist()

    def border(turns):
        return width * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high, kinds = math.floor(border(32)), math.ceil(border(1)), set()
    for pair, plain in enumerate(frequencies.tolist()):
        if pair <= low:
            want, kind = plain, "kept"
        elif pair >= high:
            want, kind = plain / 40, "stretched"
        else:
            ramp = (pair - low) / (high - low)
            want, kind = plain * (1 - ramp) + plain / 40 * ramp, "blended"
        kinds.add(kind)
        assert found[pair] == pytest.approx(want, rel=1e-12)
    assert kinds == {"kept", "blended", "stretched"}


def test_yarn_sharpens_the_scores():
    """All scores by (0.1 mscale ln factor + 1) squared where both strengths are equal."""
    for mscale in (1.0, 0.707):
        yarn = Yarn(40.0, 4096, mscale=mscale, mscale_all_dim=mscale)
        plain = LatentAttention(16, 2, None, 8, 4, 4, 4, 1e-6).double()
        sharp = LatentAttention(16, 2, None, 8, 4, 4, 4, 1e-6, yarn.sharpness()).double()
        sharp.load_state_dict(plain.state_dict())
        want = scores(plain) * (0.1 * mscale * math.log(40.0) + 1) ** 2
        torch.testing.assert_close(scores(sharp), want, rtol=1e-12, atol=1e-12)


def scores(attention):
    seen = []
    attention.inner.register_forward_pre_hook(lambda _, args: seen.extend(args))
    x = torch.randn(1, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.zeros(1, 5, dtype=torch.int64)  # five documents: RoPE turns nothing
    attention(x, positions, Rope(4, 10_000.0)(positions, positions, x.dtype))
    q, k, *_ = seen
    return q @ k.mT


def test_yarn_strengths_apart():
    turned, unturned = Yarn(8.0, 64, mscale=1.0, mscale_all_dim=0.5).sharpness()
    assert turned == pytest.approx((0.1 * math.log(8) + 1) ** 2)
    assert unturned == pytest.approx((0.05 * math.log(8) + 1) ** 2)


def test_what_a_converter_must_permute():
    """Published weights turn neighbours: with even numbers first and odd ones behind, halves are turned alike."""
    q = torch.randn(1, 7, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    order = [*range(0, 8, 2), *range(1, 8, 2)]
    (turned,) = Rope(8, 100.0)(torch.zeros(1, 7), None, q.dtype)(q[..., order])
    for t in range(7):
        for i in range(4):
            want = torch.complex(q[:, t, :, 2 * i], q[:, t, :, 2 * i + 1]) * cmath.exp(1j * t * 100.0 ** (-2 * i / 8))
            torch.testing.assert_close(torch.complex(turned[:, t, :, i], turned[:, t, :, i + 4]), want)


def test_qwen3_sharpens_its_scores():
    with torch.device("meta"):
        stretched = qk_norm(rope_scaling={"factor": 4.0, "original_max_seq_len": 4})
    assert stretched.layers["0"].attention.sharpness == pytest.approx((0.1 * math.log(4) + 1) ** 2)
