"""Qwen3 under transformers' TP: a gradient that is summed over ranks after each backward, with all that came before."""

import os
import tempfile

from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.distributed import DistributedConfig

from plait.testing import Comparison, random_tokens

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
PATH = os.path.join(tempfile.gettempdir(), "plait-detected-qwen3")
if not os.path.exists(PATH):
    AutoModelForCausalLM.from_config(Qwen3Config(**SIZES)).save_pretrained(PATH)


def build(**options):
    return AutoModelForCausalLM.from_pretrained(PATH, **options)


def parallelize(model, mesh):
    return build(dtype=model.dtype, distributed_config=DistributedConfig(tp_size=2))


def qwen3():
    off = dict.fromkeys(["saved", "norm"], "gradients are what is asked here")
    return Comparison(build=build, parallelize=parallelize, batch=random_tokens(vocab=64), mesh={"tp": 2}, off=off)
