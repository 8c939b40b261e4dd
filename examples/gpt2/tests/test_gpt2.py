"""The model computes what GPT-2 computes, and strategies train it as one process does."""

import functools
from typing import Any

import pytest
import torch
from plait_gpt2 import Gpt2

from plait import PlaitError
from plait.testing import Trial, assert_same, train

SMALL = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "max_seq_len": 32}
TENSOR, FSDP2 = {"tensor_parallel": {"degree": 2}}, {"fsdp2": {}}


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(PlaitError, match=r"model\.n_heads is 3; it must divide model\.dim=32"):
        Gpt2(**{**SMALL, "n_heads": 3})


def test_the_logits_of_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ours = Gpt2(**SMALL).double()
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    theirs = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for param in ours.parameters():
            param.normal_(0, 0.3)
        there: Any = theirs.transformer
        there.wte.weight.copy_(ours.tokens.weight)
        there.wpe.weight.copy_(ours.places.weight)
        pairs = [(there.ln_f, ours.norm)]
        blocks: Any = ours.blocks
        for block, own in zip(there.h, blocks, strict=True):
            pairs += [(block.ln_1, own.norm1), (block.ln_2, own.norm2)]
            fused = (own.attention.q, own.attention.k, own.attention.v)
            block.attn.c_attn.weight.copy_(torch.cat([w.weight.T for w in fused], 1))
            block.attn.c_attn.bias.copy_(torch.cat([w.bias for w in fused]))
            rest = (
                (block.attn.c_proj, own.attention.out),
                (block.mlp.c_fc, own.mlp.up),
                (block.mlp.c_proj, own.mlp.down),
            )
            for conv, linear in rest:
                conv.weight.copy_(linear.weight.T)  # theirs are stored the other way round
                conv.bias.copy_(linear.bias)
        for norm, own in pairs:
            norm.load_state_dict(own.state_dict())
        tokens = torch.randint(64, (2, 32))
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("strategies", "world"),
    [
        pytest.param(FSDP2, 2, marks=pytest.mark.slow),
        (TENSOR, 2),
        pytest.param({**TENSOR, **FSDP2}, 4, marks=pytest.mark.slow),
        pytest.param({"context_parallel": {"degree": 2}, **FSDP2}, 2, marks=pytest.mark.slow),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_as_one_process(plait_ranks, strategies, world):
    for name in strategies:
        pytest.importorskip(f"plait_{name}")
    trial = Trial(functools.partial(Gpt2, **SMALL), documents=True)
    (one,) = plait_ranks.run(train, trial, world=1)
    assert_same(plait_ranks.run(train, trial, strategies, world=world), one)
