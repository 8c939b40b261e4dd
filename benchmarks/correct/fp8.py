"""torchao's training in fp8, emulated, which a processor can do; and the same with a mean that is taken twice."""

import attrs
from mine import Model, loss
from plain import without_ranks
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from plait.testing import Comparison, random_tokens


def fp8(model):
    return convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))


def sharded(model, mesh):
    for block in fp8(model).blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2():
    given = {"build": Model, "parallelize": sharded, "batch": random_tokens(vocab=64, shifted=True), "loss": loss}
    return Comparison(**given, mesh={"dp": 2}, dtype="float32", rounded=fp8)


def averaged_twice():
    return attrs.evolve(fsdp2(), loss=without_ranks)
