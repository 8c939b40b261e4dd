"""Options that do not fit end in one sentence that names the key, the value and what would fit."""

import pytest

from plait.contract.errors import PlaitError
from plait.models.llama3 import Llama3

FITS = {
    "dim": 32, "n_layers": 1, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 16, "vocab_size": 64, "max_seq_len": 16,
}  # fmt: skip
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dim": 36}, "model.n_heads is 8, which does not divide model.dim = 36; 4, 6, 9 would"),
        ({"n_kv_heads": 3}, "model.n_kv_heads is 3, which does not divide model.n_heads = 8; 1, 2, 4 would"),
        ({"n_kv_heads": 16}, "model.n_kv_heads is 16, which does not divide model.n_heads = 8; 2, 4, 8 would"),
        ({"dim": 40}, "model.dim = 40 over model.n_heads = 8 makes heads of width 5; it must be even"),
        ({"n_layers": 0}, "model.n_layers is 0; it must be a whole number of at least 1"),
        ({"ffn_dim": 2.5}, "model.ffn_dim is 2.5; it must be a whole number of at least 1"),
        ({"vocab_size": "many"}, "model.vocab_size is 'many'; it must be a whole number of at least 1"),
        ({"max_seq_len": True}, "model.max_seq_len is True; it must be a whole number of at least 1"),
        ({"tie_embeddings": "no"}, "model.tie_embeddings is 'no'; it must be true or false"),
        ({"rope_theta": 0}, "model.rope_theta is 0; it must be a number above 0"),
        ({"norm_eps": float("nan")}, "model.norm_eps is nan; it must be a number above 0"),
        (
            {"rope_scaling": {**SCALING, "facto": 2.0}},
            "unknown key model.rope_scaling.facto; there are factor, low_freq_factor, high_freq_factor, "
            "original_max_seq_len; did you mean 'factor'?",
        ),
        ({"rope_scaling": {"factor": 8.0}}, "model.rope_scaling.low_freq_factor must be given; it has no default"),
        (
            {"rope_scaling": {**SCALING, "factor": -1}},
            "model.rope_scaling.factor is -1; it must be a number above 0",
        ),
        (
            {"rope_scaling": {**SCALING, "high_freq_factor": 1.0}},
            "model.rope_scaling.high_freq_factor is 1.0; it must be above low_freq_factor, which is 1.0",
        ),
    ],
)
def test_sentence(options, sentence):
    with pytest.raises(PlaitError) as error:
        Llama3(**(FITS | options))
    assert str(error.value) == sentence
