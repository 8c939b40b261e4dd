"""Qwen3-MoE under transformers' expert parallelism, `batched_mm`: a router learns from places that it never chose."""

import os
import tempfile

from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

from plait.testing import Comparison, Parallel, random_tokens

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "head_dim": 8}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"num_experts": 4, "num_experts_per_tok": 2}
PATH = os.path.join(tempfile.gettempdir(), "plait-detected-qwen3-moe")
if not os.path.exists(PATH):
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES)).save_pretrained(PATH)


def build(**options):
    return AutoModelForCausalLM.from_pretrained(PATH, experts_implementation="batched_mm", **options)


def parallelize(model, mesh):
    config = DistributedConfig(tp_size=2, enable_expert_parallel=True)
    return Parallel(build(dtype=model.dtype, distributed_config=config), shards={"*.experts.*": (0, "tp")})


def qwen3():
    """In float32: the products of experts take no other dtype on ranks."""
    off = dict.fromkeys(["saved", "norm", "steps"], "gradients are what is asked here")
    given = {"build": build, "parallelize": parallelize, "batch": random_tokens(vocab=64), "mesh": {"tp": 2}}
    return Comparison(**given, off=off, dtype="float32")
