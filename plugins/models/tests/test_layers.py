"""RoPE, its scaling, norms of queries and the mask of packed documents against definitions written out."""

import cmath
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from plait.ops.attention import CausalAttention, document_mask
from plait.testing import Trial
from plait_models.layers import Rope, RopeScaling
from plait_testing.models import qk_norm

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def turned(x_BTHE, rope, positions=None):
    return rope(torch.zeros(x_BTHE.shape[:2]), positions, x_BTHE.dtype)(x_BTHE)[0]


def test_rope_multiplies_pairs_as_complex_numbers():
    q = random(2, 5, 4, 8)
    q_turned = turned(q, Rope(8, 100.0))
    for t in range(5):
        for i in range(4):
            turn = cmath.exp(1j * t * 100.0 ** (-2 * i / 8))
            want = torch.complex(q[:, t, :, i], q[:, t, :, i + 4]) * turn
            torch.testing.assert_close(torch.complex(q_turned[:, t, :, i], q_turned[:, t, :, i + 4]), want)


class Written(TorchDispatchMode):
    """number: operators that write a tensor of `elements` or more real numbers."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.number = elements, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if args and result.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
            self.number += result.numel() * (1 + result.is_complex()) >= self.elements
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_writes_few_tensors_forward_and_backward(dtype):
    x = torch.ones(2, 5, 4, 8, dtype=dtype, requires_grad=True)
    turns = Rope(8, 100.0)(torch.zeros(2, 5), None, dtype)
    with Written(x.numel()) as forward:
        (y,) = turns(x)
    gradient = torch.ones_like(y)
    with Written(x.numel()) as backward:
        y.backward(gradient)
    assert (forward.number, backward.number) == (3, 3)


def test_a_compiled_rope_computes_the_same():
    x = random(2, 5, 4, 8).requires_grad_()
    turns = Rope(8, 100.0)(torch.zeros(2, 5), None, x.dtype)
    want = torch.autograd.grad(turns(x)[0].sin().sum(), x)
    found = torch.autograd.grad(torch.compile(turns, backend="aot_eager")(x)[0].sin().sum(), x)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-14)


def test_rope_scores_depend_on_distance_alone():
    q, k = random(1, 1, 1, 8).expand(1, 9, 1, 8), random(1, 1, 1, 8).expand(1, 9, 1, 8)
    q, k = turned(q, Rope(8, 10_000.0)), turned(k, Rope(8, 10_000.0))
    scores = q[0, :, 0] @ k[0, :, 0].T
    torch.testing.assert_close(scores[3, 1], scores[7, 5])
    torch.testing.assert_close(scores[8, 2], scores[6, 0])


def test_rope_of_positions_is_a_row_of_rope():
    q = random(2, 6, 2, 4)
    rope = Rope(4, 10_000.0)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    found = turned(q, rope, positions)
    torch.testing.assert_close(found[1], turned(q, rope)[1])
    torch.testing.assert_close(found[0, 3:], turned(q[:, 3:], rope)[0])


def test_rope_angles_are_not_rounded_to_bfloat16():
    q = torch.ones(1, 300, 1, 2, dtype=torch.bfloat16)
    found = turned(q, Rope(2, 10_000.0))
    assert found.dtype is torch.bfloat16
    assert found[0, 299, 0, 0].item() == pytest.approx(math.cos(299) - math.sin(299), abs=0.01)


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
    a, b = turned(q, plain), turned(q, scaled)
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


def turns_of(name, remat):
    """How often cosines and sines are computed in a step."""
    trial = Trial(name, remat=remat)
    applied = trial.apply({})
    tokens, _ = trial.batch(0)
    calls = Counter()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls[func._schema.name] += 1
            return func(*args, **(kwargs or {}))

    with Calls():
        applied.backward(applied.parts[0](tokens).sum(), tokens.numel())
    return calls["aten::cos"], calls["aten::sin"]


@pytest.mark.parametrize("name", ["llama3", "qk_norm", "mla", "moe"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_turns_are_computed_once_per_forward(plait_ranks, name, remat):
    """For all blocks together, and not again where blocks are recomputed."""
    assert plait_ranks.run(turns_of, name, remat, world=1) == [(1, 1)]


def test_queries_and_keys_are_normed_before_they_turn():
    """Attention by its definition, written out token by token."""
    torch.manual_seed(0)
    model = qk_norm(n_heads=8, n_kv_heads=4, head_dim=16).double()
    layer = model.layers["0"].attention
    torch.nn.init.normal_(layer.q_norm.weight, 1, 0.3)
    torch.nn.init.normal_(layer.k_norm.weight, 1, 0.3)
    x = torch.randn(1, 5, 32, dtype=torch.float64)

    def normed(vector, weight):
        return vector / (vector.square().mean() + 1e-6).sqrt() * weight

    def turned(vector, place):
        angles = place * 1_000_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
        a, b = vector[:8], vector[8:]
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()])

    out = torch.zeros(5, 8, 16, dtype=torch.float64)
    for head in range(8):
        rows, shared = slice(16 * head, 16 * head + 16), slice(16 * (head // 2), 16 * (head // 2) + 16)
        for t in range(5):
            q = turned(normed(layer.wq.weight[rows] @ x[0, t], layer.q_norm.weight), t)
            keys = [turned(normed(layer.wk.weight[shared] @ x[0, s], layer.k_norm.weight), s) for s in range(t + 1)]
            weights = (torch.stack(keys) @ q / 4).softmax(0)
            out[t, head] = sum(w * (layer.wv.weight[shared] @ x[0, s]) for s, w in enumerate(weights))
    want = out.flatten(1) @ layer.wo.weight.T
    turns = model.rope(torch.zeros(1, 5), None, x.dtype)
    torch.testing.assert_close(layer(x, None, turns)[0], want, rtol=0, atol=1e-12)
