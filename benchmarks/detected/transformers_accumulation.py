"""Qwen3 under transformers' TP: a gradient that is summed over ranks after each backward, with all that came before."""

import attrs
import transformers_tp
from transformers.distributed import DistributedConfig


def parallelize(model, mesh):
    return transformers_tp.build(dtype=model.dtype, distributed_config=DistributedConfig(tp_size=2))


def qwen3():
    return attrs.evolve(transformers_tp.qwen3(), parallelize=parallelize)
