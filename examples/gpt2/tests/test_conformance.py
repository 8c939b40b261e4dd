"""The model keeps what a model owes to strategies."""

from plait.testing import ModelSuite


class TestGpt2(ModelSuite):
    model = "gpt2_debug"
    options = {"dim": 32, "n_layers": 3, "n_heads": 4, "vocab_size": 64, "max_seq_len": 32}
    ties = (("head.weight", "tokens.weight"),)
    constant = ("blocks.*.attention.k.bias",)
    counts = {"gpt2": 124_439_808, "gpt2_debug": 3_491_328}
