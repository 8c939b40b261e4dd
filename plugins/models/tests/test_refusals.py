"""Options that do not fit end in an error about the key, the value and what would fit."""

import functools
import math

import pytest
import torch

from plait.testing import raises_about
from plait_models.moe import check
from plait_testing.models import llama3, moe, qk_norm

WHOLE, ABOVE, UNSAID = "a whole number of at least 1", "a number above 0", ()
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
YARN = {"factor": 4.0, "original_max_seq_len": 16}
mixed = functools.partial(qk_norm, ffn_dim=16)


@pytest.mark.parametrize(
    ("model", "options", "key", "value", "fits"),
    [
        (llama3, {"dim": 36, "n_heads": 8}, "n_heads", 8, (4, 6, 9)),
        (llama3, {"n_kv_heads": 3}, "n_kv_heads", 3, (1, 2, 4)),
        (llama3, {"n_heads": 8, "n_kv_heads": 16}, "n_kv_heads", 16, (2, 4, 8)),
        (llama3, {"dim": 40, "n_heads": 8}, "n_heads", 8, "heads of an even width"),
        *((llama3, {key: 0}, key, 0, WHOLE) for key in ("dim", "n_layers", "n_heads", "n_kv_heads", "max_seq_len")),
        (llama3, {"ffn_dim": 2.5}, "ffn_dim", 2.5, WHOLE),
        (llama3, {"vocab_size": "many"}, "vocab_size", "many", WHOLE),
        (llama3, {"max_seq_len": True}, "max_seq_len", True, WHOLE),
        (llama3, {"tie_embeddings": "no"}, "tie_embeddings", "no", "true or false"),
        (llama3, {"rope_theta": 0}, "rope_theta", 0, ABOVE),
        (llama3, {"norm_eps": math.inf}, "norm_eps", math.inf, ABOVE),
        (llama3, {"rope_scaling": {**SCALING, "facto": 2.0}}, "rope_scaling.facto", None, tuple(SCALING)),
        (llama3, {"rope_scaling": {"factor": 8.0}}, "rope_scaling.low_freq_factor", None, ()),
        (llama3, {"rope_scaling": {**SCALING, "factor": -1}}, "rope_scaling.factor", -1, ABOVE),
        (
            *(llama3, {"rope_scaling": {**SCALING, "high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor", 1.0),
            "above low_freq_factor, which is 1.0",
        ),
        (qk_norm, {"n_heads": 8, "n_kv_heads": 3}, "n_kv_heads", 3, (1, 2, 4)),
        (qk_norm, {"head_dim": 15}, "head_dim", 15, "even"),
        (qk_norm, {"head_dim": 0}, "head_dim", 0, WHOLE),
        (qk_norm, {"rope_scaling": {"factor": 4.0}}, "rope_scaling.original_max_seq_len", None, ()),
        (mixed, {"n_experts": -1}, "n_experts", -1, UNSAID),
        (mixed, {"n_experts": 8, "top_k": 9}, "top_k", 9, UNSAID),
        (mixed, {"n_experts": 8, "top_k": 0}, "top_k", 0, UNSAID),
        (mixed, {"n_experts": 8, "top_k": 2, "balance_loss": -1.0}, "balance_loss", -1.0, UNSAID),
        (moe, {"qk_rope_head_dim": 5}, "qk_rope_head_dim", 5, "even"),
        (moe, {"q_lora_rank": 0}, "q_lora_rank", 0, WHOLE),
        (moe, {"n_dense_layers": -1}, "n_dense_layers", -1, "a whole number of at least 0"),
        (moe, {"rope_theta": 0}, "rope_theta", 0, ABOVE),
        (moe, {"norm_eps": -1.0}, "norm_eps", -1.0, ABOVE),
        (moe, {"score": "relu"}, "score", "relu", "'sigmoid' or 'softmax'"),
        (moe, {"bias_update": -0.1}, "bias_update", -0.1, "a number of at least 0"),
        (moe, {"top_k": 9}, "top_k", 9, "at most model.n_experts = 8"),
        (moe, {"rope_scaling": {"factor": 4.0}}, "rope_scaling.original_max_seq_len", None, ()),
        (
            *(moe, {"rope_scaling": {**YARN, "beta_fst": 32}}, "rope_scaling.beta_fst", None),
            ("factor", "original_max_seq_len", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        ),
    ],
)  # fmt: skip
def test_of_a_model(model, options, key, value, fits):
    with raises_about(f"model.{key}", value, fits):
        model(**options)


@pytest.mark.parametrize(
    ("options", "key", "value", "fits"),
    [
        ((8, 9), "top_k", 9, "at most model.n_experts = 8"),
        ((8, 2, 3), "n_groups", 3, (1, 2, 4)),
        ((8, 2, 4, 5), "top_groups", 5, "at most model.n_groups = 4"),
        ((8, 3, 4, 1), "top_k", 3, "at most 2"),
        ((8, 2, 8, 2, 2), "group_top", 2, "at most 1"),
    ],
)
def test_of_a_mixture(options, key, value, fits):
    with raises_about(f"model.{key}", value, fits):
        check(*options)


@pytest.mark.parametrize("model", [llama3, qk_norm, moe])
def test_a_longer_sequence(model):
    with torch.device("meta"), raises_about("model.max_seq_len", 64, "at least 65"):
        model()(torch.zeros(1, 65, dtype=torch.int64))
