"""Options that do not fit end in an error about the key, the value and what would fit."""

import math

import pytest

from plait.models.llama3 import Llama3
from plait.testing import raises_about

FITS = {
    "dim": 32, "n_layers": 1, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 16, "vocab_size": 64, "max_seq_len": 16,
}  # fmt: skip
WHOLE = "a whole number of at least 1"
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}


@pytest.mark.parametrize(
    ("options", "key", "value", "fits"),
    [
        ({"dim": 36}, "n_heads", 8, (4, 6, 9)),
        ({"n_kv_heads": 3}, "n_kv_heads", 3, (1, 2, 4)),
        ({"n_kv_heads": 16}, "n_kv_heads", 16, (2, 4, 8)),
        ({"dim": 40}, "n_heads", 8, "heads of an even width"),
        ({"n_layers": 0}, "n_layers", 0, WHOLE),
        ({"ffn_dim": 2.5}, "ffn_dim", 2.5, WHOLE),
        ({"vocab_size": "many"}, "vocab_size", "many", WHOLE),
        ({"max_seq_len": True}, "max_seq_len", True, WHOLE),
        ({"tie_embeddings": "no"}, "tie_embeddings", "no", "true or false"),
        ({"rope_theta": 0}, "rope_theta", 0, "a number above 0"),
        ({"norm_eps": math.inf}, "norm_eps", math.inf, "a number above 0"),
        (
            {"rope_scaling": {**SCALING, "facto": 2.0}},
            "rope_scaling.facto",
            None,
            ("factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"),
        ),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling.low_freq_factor", None, ()),
        (
            {"rope_scaling": {**SCALING, "factor": -1}},
            "rope_scaling.factor",
            -1,
            "a number above 0",
        ),
        (
            {"rope_scaling": {**SCALING, "high_freq_factor": 1.0}},
            "rope_scaling.high_freq_factor",
            1.0,
            "above low_freq_factor, which is 1.0",
        ),
    ],
)
def test_what_is_at_fault(options, key, value, fits):
    with raises_about(f"model.{key}", value, fits):
        Llama3(**(FITS | options))
