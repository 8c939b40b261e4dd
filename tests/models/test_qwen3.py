"""Qwen3 itself: published sizes, operations a token, options. What holds of every model is in test_specs.py."""

import pickle
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

import plait
from plait.models.qwen3 import Qwen3
from plait.testing import raises_about

CONF = Path(plait.__file__).parent / "conf" / "model"
TINY = {
    "dim": 32, "n_layers": 3, "n_heads": 8, "n_kv_heads": 4, "head_dim": 16, "ffn_dim": 48, "vocab_size": 64,
    "max_seq_len": 16,
}  # fmt: skip
MIXED = {**TINY, "n_experts": 8, "top_k": 2}


def tokens(batch=2, length=16):
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(0))


def attention(dim, heads, kv_heads, width):
    return 2 * dim * heads * width + 2 * dim * kv_heads * width + 2 * width  # and the norms of queries and keys


def build(name):
    with torch.device("meta"):
        return instantiate(OmegaConf.load(CONF / f"{name}.yaml"))


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_parameters_of_0_6b_by_hand():
    block = attention(1024, 16, 8, 128) + 3 * 1024 * 3072 + 2 * 1024
    assert count(build("qwen3_0.6b")) == 28 * block + 1024 + 151936 * 1024 == 596_049_920


def test_parameters_of_8b_by_hand():
    block = attention(4096, 32, 8, 128) + 3 * 4096 * 12288 + 2 * 4096
    assert count(build("qwen3_8b")) == 36 * block + 4096 + 2 * 151936 * 4096 == 8_190_735_360


def test_parameters_of_30b_a3b_by_hand():
    block = attention(2048, 32, 4, 128) + 128 * 2048 + 128 * 3 * 2048 * 768 + 2 * 2048
    assert count(build("qwen3_30b_a3b")) == 48 * block + 2048 + 2 * 151936 * 2048 == 30_532_122_624


def test_flops_count_the_experts_that_a_token_visits():
    block = attention(2048, 32, 4, 128) + 128 * 2048 + 8 * 3 * 2048 * 768 + 2 * 2048
    parameters = 48 * block + 2048 + 151936 * 2048
    scores = 48 * 32 * (128 + 128) * 4096
    assert build("qwen3_30b_a3b").spec().flops(4096) == 6 * parameters + 6 * scores


def test_flops_of_a_tied_head_still_count():
    block = attention(1024, 16, 8, 128) + 3 * 1024 * 3072 + 2 * 1024
    parameters = 28 * block + 1024 + 151936 * 1024
    assert build("qwen3_0.6b").spec().flops(4096) == 6 * parameters + 6 * 28 * 16 * (128 + 128) * 4096


def test_queries_and_keys_are_normed_before_they_turn():
    """Attention by its definition, written out token by token."""
    torch.manual_seed(0)
    model = Qwen3(**TINY).double()
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


@pytest.mark.parametrize("options", [TINY, pytest.param(MIXED, marks=pytest.mark.slow)], ids=["dense", "experts"])
def test_one_graph_serves_all_blocks(options):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Qwen3(**options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    want = model(tokens())
    graphs = CompileCounterWithBackend("aot_eager")
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, backend=graphs, fullgraph=True)
    torch.testing.assert_close(model(tokens()), want)
    model(tokens()).sum().backward()
    assert graphs.frame_count == 1
    torch._dynamo.reset()


def test_yarn_stretches_and_sharpens():
    torch.manual_seed(0)
    plain = Qwen3(**TINY).double()
    torch.manual_seed(0)
    stretched = Qwen3(**TINY, rope_scaling={"factor": 4.0, "original_max_seq_len": 4}).double()
    assert not torch.allclose(stretched(tokens()), plain(tokens()))
    assert stretched.layers["0"].attention.sharpness == pytest.approx((0.1 * torch.tensor(4.0).log().item() + 1) ** 2)


def test_tied_embeddings_are_one_parameter():
    with torch.device("meta"):
        model = Qwen3(**TINY, tie_embeddings=True)
    assert model.output.weight is model.tok_embeddings.weight


def test_specs_of_equal_models_are_equal():
    with torch.device("meta"):
        spec = Qwen3(**MIXED).spec()
        assert spec == Qwen3(**MIXED).spec()
        assert spec != Qwen3(**TINY).spec()
        assert Qwen3(**TINY).spec().routers == ()
        assert list(spec.routers_of(Qwen3(**MIXED))) == [f"layers.{i}.feed_forward.router" for i in range(3)]
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    ("options", "key", "value", "fits"),
    [
        ({"n_kv_heads": 3}, "n_kv_heads", 3, (1, 2, 4)),
        ({"head_dim": 15}, "head_dim", 15, "even"),
        ({"head_dim": 0}, "head_dim", 0, "a whole number of at least 1"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.original_max_seq_len", None, ()),
    ],
)
def test_bad_options(options, key, value, fits):
    with raises_about(f"model.{key}", value, fits):
        Qwen3(**(TINY | options))


@pytest.mark.parametrize("options", [{"n_experts": -1}, {"top_k": 9}, {"top_k": 0}, {"balance_loss": -1.0}])
def test_bad_options_of_experts_name_the_key(options):
    [(key, value)] = options.items()
    with raises_about(f"model.{key}", value):
        Qwen3(**(MIXED | options))


def test_a_longer_sequence_is_refused():
    with raises_about("model.max_seq_len", 16, "at least 17"):
        Qwen3(**TINY)(tokens(1, 17))
