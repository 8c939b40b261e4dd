"""Llama 3 itself: dtypes, init, graphs, and taking it apart. What holds of every model is in test_specs.py."""

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from plait.models.llama3 import Llama3
from plait.testing import raises_about

TINY = {
    "dim": 32, "n_layers": 3, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 48, "vocab_size": 64, "max_seq_len": 16,
}  # fmt: skip


def tokens(batch=2, length=16):
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("packed", [False, True])
def test_dtypes_agree(dtype, close, packed):
    torch.manual_seed(0)
    model = Llama3(**TINY).double()
    positions = torch.arange(8).repeat(2).expand(2, 16) if packed else None
    want = model(tokens(), positions)
    assert want.dtype is torch.float64
    got = model.to(dtype)(tokens(), positions)
    assert got.dtype is dtype
    assert (got.double() - want).norm() < close * want.norm()


def test_one_graph_serves_all_blocks():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Llama3(**TINY)
    positions = torch.arange(8).repeat(2).expand(2, 16)
    want, want_packed = model(tokens()), model(tokens(), positions)
    graphs = CompileCounterWithBackend("aot_eager")
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, backend=graphs, fullgraph=True)
    torch.testing.assert_close(model(tokens()), want)
    model(tokens()).sum().backward()
    assert graphs.frame_count == 1
    torch.testing.assert_close(model(tokens(), positions), want_packed)
    assert graphs.frame_count == 2  # packing is another graph, and again one for all
    torch._dynamo.reset()


def test_rope_scaling_compiles():
    torch._dynamo.reset()
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8}
    torch.manual_seed(0)
    model = Llama3(**TINY, rope_scaling=scaling)
    want = model(tokens())
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(tokens()), want)
    torch._dynamo.reset()
    torch.manual_seed(0)
    assert not torch.allclose(Llama3(**TINY)(tokens()), want)


def test_rope_reads_the_positions():
    """Within a document only distances count, so a gap shows what a shift does not."""
    torch.manual_seed(0)
    model = Llama3(**TINY).double()
    positions = torch.arange(16) + 9 * (torch.arange(16) >= 8)
    want, gap = model(tokens()), model(tokens(), positions.expand(2, 16))
    torch.testing.assert_close(gap[:, :8], want[:, :8], rtol=0, atol=1e-13)
    assert (gap - want)[:, 8:].abs().amin(dim=-1).max() > 1e-9


def test_tied_embeddings_are_one_parameter():
    with torch.device("meta"):
        model = Llama3(**TINY, tie_embeddings=True)
    assert model.output.weight is model.tok_embeddings.weight
    assert model.spec().init_of("tok_embeddings.weight") == model.spec().init_of("output.weight")


def test_a_longer_sequence_is_refused():
    with raises_about("model.max_seq_len", 16, "at least 17"):
        Llama3(**TINY)(tokens(1, 17))


def test_stages_of_blocks_make_the_whole():
    """A pipeline's stage is the model without what stands elsewhere, and calls the same forward."""
    torch.manual_seed(0)
    whole = Llama3(**TINY)
    want = whole(tokens())
    first, last = pickle.loads(pickle.dumps(whole)), pickle.loads(pickle.dumps(whole))
    first.norm = first.output = nn.Identity()
    del first.layers["1"], first.layers["2"]
    last.tok_embeddings = nn.Identity()
    del last.layers["0"]
    torch.testing.assert_close(last(first(tokens())), want)
    assert {name for name, _ in last.named_parameters()} < {name for name, _ in whole.named_parameters()}


def test_depth_scales_what_joins_the_stream():
    with torch.device("meta"):
        spec = Llama3(**TINY).spec()
    wide: Any = spec.init_of("layers.0.attention.wq.weight")
    narrow: Any = spec.init_of("layers.2.attention.wo.weight")
    assert narrow == spec.init_of("layers.1.feed_forward.w2.weight")
    assert narrow.std == pytest.approx(wide.std / 6**0.5)  # 3 blocks of 2 summands


def test_specs_of_equal_models_are_equal():
    with torch.device("meta"):
        spec = Llama3(**TINY).spec()
        assert spec == Llama3(**TINY).spec()
        assert spec != Llama3(**{**TINY, "n_kv_heads": 2}).spec()
    assert pickle.loads(pickle.dumps(spec)) == spec
