"""Decoders of transformers keep what a model owes to strategies."""

from families import keys_of

from plait.testing import ModelSuite


class TestLlama(ModelSuite):
    model = "transformers"
    options = {"config": keys_of("llama")}


class TestGemma2(ModelSuite):  # every other block has a window; caps; a tied head
    model = "transformers"
    graphs = 2
    options = {"config": keys_of("gemma2")}
    ties = (("lm_head.weight", "model.embed_tokens.weight"),)


class TestMixtral(ModelSuite):
    model = "transformers"
    options = {"config": keys_of("mixtral")}
