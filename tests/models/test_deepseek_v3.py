"""DeepSeek-V3: its counts and operations by hand, YaRN by its paper, balance, graphs. What holds of all models is in
test_specs.py, agreement with the published code in test_transformers.py."""

import cmath
import math
import pickle
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

import plait
from plait.models.layers import Rope
from plait.models.mla import LatentAttention, Yarn
from plait.parallel.initialize import initialise, materialise
from plait.testing import raises_about
from plait.testing.models import moe

CONF = Path(plait.__file__).parent / "conf" / "model"


def build(name):
    with torch.device("meta"):
        return instantiate(OmegaConf.load(CONF / f"{name}.yaml"))


def real(dtype=torch.float64, **changes):
    with torch.device("meta"):
        model = moe(**changes)
    model.to(dtype)
    materialise(model, "cpu")
    initialise(model, model.spec(), seed=0)
    return model


def tokens(batch=2, length=16):
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(0))


def test_parameters_of_671b_by_hand():
    heads, width = 128, 128 + 64
    attention = 7168 * 1536 + 1536 + 1536 * heads * width  # queries
    attention += 7168 * (512 + 64) + 512 + 512 * heads * (128 + 128) + heads * 128 * 7168  # keys, values, output
    mixture = 256 * 7168 + (256 + 1) * 3 * 7168 * 2048  # router, experts, the shared one
    dense = 3 * 7168 * 18432
    total = 61 * (attention + 2 * 7168) + 3 * dense + 58 * mixture + 2 * 129280 * 7168 + 7168
    model = build("deepseek_v3_671b")
    assert sum(p.numel() for p in model.parameters()) == total == 671_026_404_352
    biases = sum(b.numel() for name, b in model.named_buffers() if name.endswith("router.bias"))
    assert total + biases == 671_026_419_200  # as published


def test_parameters_of_16b_by_hand():
    attention = 2048 * 16 * (128 + 64) + 2048 * (512 + 64) + 512 + 512 * 16 * (128 + 128) + 16 * 128 * 2048
    mixture = 64 * 2048 + (64 + 2) * 3 * 2048 * 1408
    total = 27 * (attention + 2 * 2048) + 3 * 2048 * 10944 + 26 * mixture + 2 * 102400 * 2048 + 2048
    assert sum(p.numel() for p in build("deepseek_v3_16b").parameters()) == total == 15_706_484_224


def test_flops_of_16b_count_only_experts_that_a_token_visits():
    attention = 2048 * 16 * (128 + 64) + 2048 * (512 + 64) + 512 + 512 * 16 * (128 + 128) + 16 * 128 * 2048
    mixture = 64 * 2048 + (6 + 2) * 3 * 2048 * 1408
    met = 27 * (attention + 2 * 2048) + 3 * 2048 * 10944 + 26 * mixture + 102400 * 2048 + 2048
    scores = 27 * 16 * (128 + 64 + 128) * 4096
    assert build("deepseek_v3_16b").spec().flops(4096) == 6 * (met + scores)


def test_debug_costs_about_as_much_as_llama3_debug():
    mine, theirs = (build(f"{name}_debug").spec().flops(256) for name in ("deepseek_v3", "llama3"))
    assert 0.8 < mine / theirs < 1.25


def test_every_key_of_the_debug_model_divides_by_four():
    model = build("deepseek_v3_debug")
    sizes = {n for name, p in model.named_parameters() for n in p.shape}
    assert not [n for n in sizes if n % 4]


def test_init_follows_the_scheme():
    model = real(torch.float32, dim=64, n_heads=8, expert_ffn_dim=64, ffn_dim=96)
    onto = 0.02 / math.sqrt(2 * 3)
    for name, std in {
        "layers.1.feed_forward.experts.w1": 0.02,
        "layers.1.feed_forward.experts.w2": onto,
        "layers.1.feed_forward.shared.w2.weight": onto,
        "layers.0.feed_forward.w2.weight": onto,
        "layers.2.attention.wo.weight": onto,
        "layers.2.attention.wkv_b.weight": 0.02,
        "layers.2.feed_forward.router.weight": 0.02,
        "tok_embeddings.weight": 1.0,
    }.items():
        assert model.get_parameter(name).std().item() == pytest.approx(std, rel=0.1), name
    assert not any(b.any() for b in model.buffers())


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
    turned = Rope(8, 100.0)(torch.zeros(1, 7), None, q.dtype)(q[..., order])
    for t in range(7):
        for i in range(4):
            want = torch.complex(q[:, t, :, 2 * i], q[:, t, :, 2 * i + 1]) * cmath.exp(1j * t * 100.0 ** (-2 * i / 8))
            torch.testing.assert_close(torch.complex(turned[:, t, :, i], turned[:, t, :, i + 4]), want)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_dtypes_agree(dtype, close):
    """Where routing is the same: in bfloat16 a close choice may fall otherwise, so all experts are visited there."""
    model = real(top_k=4, n_groups=1)
    want = model(tokens())
    got = model.to(dtype)(tokens())
    assert got.dtype is dtype
    assert (got.double() - want).norm() < close * want.norm()


def test_two_graphs_serve_all_blocks():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = real(n_layers=4, n_dense_layers=2)
    want = model(tokens())
    graphs = CompileCounterWithBackend("aot_eager")
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, backend=graphs, fullgraph=True)
    torch.testing.assert_close(model(tokens()), want, rtol=0, atol=1e-13)
    assert graphs.frame_count == 2  # of the dense blocks, and of those with experts
    torch._dynamo.reset()


def test_it_pickles_with_its_spec():
    model = moe()
    assert pickle.loads(pickle.dumps(model.spec())) == model.spec()
    assert pickle.loads(pickle.dumps(model)).state_dict().keys() == model.state_dict().keys()


def test_longer_input_is_refused():
    with raises_about("model.max_seq_len", 64, "at least 65"):
        moe()(torch.zeros(1, 65, dtype=torch.int64))


@pytest.mark.parametrize(
    ("options", "key", "value", "fits"),
    [
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim", 5, "even"),
        ({"q_lora_rank": 0}, "q_lora_rank", 0, "a whole number of at least 1"),
        ({"n_dense_layers": -1}, "n_dense_layers", -1, "a whole number of at least 0"),
        ({"rope_theta": 0}, "rope_theta", 0, "a number above 0"),
        ({"norm_eps": -1.0}, "norm_eps", -1.0, "a number above 0"),
        ({"score": "relu"}, "score", "relu", "'sigmoid' or 'softmax'"),
        ({"bias_update": -0.1}, "bias_update", -0.1, "a number of at least 0"),
        ({"top_k": 9}, "top_k", 9, "at most model.n_experts = 8"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.original_max_seq_len", None, ()),
        (
            {"rope_scaling": {"factor": 4.0, "original_max_seq_len": 16, "beta_fst": 32}},
            "rope_scaling.beta_fst",
            None,
            ("factor", "original_max_seq_len", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        ),
    ],
)
def test_options_that_do_not_fit(options, key, value, fits):
    with raises_about(f"model.{key}", value, fits):
        moe(**options)
