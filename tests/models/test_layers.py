"""RoPE, its scaling and the mask of packed documents against definitions written out."""

import cmath
import math

import pytest
import torch
import torch.nn.functional as F

from plait.models.layers import CausalAttention, Rope, RopeScaling, document_mask

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_rope_multiplies_pairs_as_complex_numbers():
    q, k = random(2, 5, 4, 8), random(2, 5, 2, 8)
    q_turned, _ = Rope(8, 100.0)(q, k, None)
    for t in range(5):
        for i in range(4):
            turn = cmath.exp(1j * t * 100.0 ** (-2 * i / 8))
            want = torch.complex(q[:, t, :, i], q[:, t, :, i + 4]) * turn
            torch.testing.assert_close(torch.complex(q_turned[:, t, :, i], q_turned[:, t, :, i + 4]), want)


def test_rope_scores_depend_on_distance_alone():
    q, k = random(1, 1, 1, 8).expand(1, 9, 1, 8), random(1, 1, 1, 8).expand(1, 9, 1, 8)
    q, k = Rope(8, 10_000.0)(q, k, None)
    scores = q[0, :, 0] @ k[0, :, 0].T
    torch.testing.assert_close(scores[3, 1], scores[7, 5])
    torch.testing.assert_close(scores[8, 2], scores[6, 0])


def test_rope_of_positions_is_a_row_of_rope():
    q, k = random(2, 6, 2, 4), random(2, 6, 2, 4)
    rope = Rope(4, 10_000.0)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    turned, _ = rope(q, k, positions)
    torch.testing.assert_close(turned[1], rope(q, k, None)[0][1])
    torch.testing.assert_close(turned[0, 3:], rope(q[:, 3:], k[:, 3:], None)[0][0])


def test_rope_angles_are_not_rounded_to_bfloat16():
    q = torch.ones(1, 300, 1, 2, dtype=torch.bfloat16)
    turned, _ = Rope(2, 10_000.0)(q, q, None)
    assert turned.dtype is torch.bfloat16
    assert turned[0, 299, 0, 0].item() == pytest.approx(math.cos(299) - math.sin(299), abs=0.01)


def test_rope_scaling_by_cases():
    frequencies = 500_000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    scaled = SCALING(frequencies)
    cases = set()
    for plain, got in zip(frequencies.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            case, want = "kept", plain
        elif wavelength > 8192 / 1:
            case, want = "stretched", plain / 8
        else:
            blend = (8192 / wavelength - 1) / (4 - 1)
            case, want = "blended", (1 - blend) * plain / 8 + blend * plain
        cases.add(case)
        assert got == pytest.approx(want, rel=1e-12)
    assert cases == {"kept", "blended", "stretched"}


def test_scaling_reaches_rope():
    q = random(1, 9, 1, 128)
    plain, scaled = Rope(128, 500_000.0), Rope(128, 500_000.0, SCALING)
    (a, _), (b, _) = plain(q, q, None), scaled(q, q, None)
    torch.testing.assert_close(a[..., :10], b[..., :10])
    assert not torch.allclose(a, b)


def test_document_mask():
    positions = torch.tensor([[0, 1, 0, 1], [5, 6, 0, 0]])  # a row may begin in the middle of a document
    want = [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
    ]
    assert document_mask(positions).tolist() == [[[[bool(x) for x in row] for row in rows]] for rows in want]


@pytest.mark.parametrize("positions", [None, torch.arange(6).expand(2, 6)])
def test_attention_by_hand(positions):
    q, k, v = random(2, 4, 6, 8), random(2, 2, 6, 8), random(2, 2, 6, 8)
    got = CausalAttention()(q, k, v, positions)
    for head in range(4):
        scores = q[:, head] @ k[:, head // 2].transpose(1, 2) / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
        torch.testing.assert_close(got[:, head], F.softmax(scores, -1) @ v[:, head // 2])
