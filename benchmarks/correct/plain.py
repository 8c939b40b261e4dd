"""What torch itself has, on the model of docs/verify-any-code.md."""

from functools import partial

import torch
import torch.nn.functional as F
from mine import Block, Model, loss
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn.parallel import DistributedDataParallel

from plait.testing import Comparison, Parallel, random_tokens


def compared(parallelize, mesh, loss=loss, **more):
    batch = random_tokens(vocab=64, shifted=True)
    return Comparison(build=Model, parallelize=parallelize, batch=batch, loss=loss, mesh=mesh, **more)


def megatron(model, mesh):
    plan = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    for block in model.blocks:
        tp.parallelize_module(block, mesh["tp"], plan)
    return model


def tensor():
    return compared(megatron, {"tp": 2})


def in_parts(model, mesh):
    """Norms get a part of the sequence."""
    for block in model.blocks:
        up = tp.ColwiseParallel(input_layouts=Shard(1))
        plan = {"norm": tp.SequenceParallel(), "up": up, "down": tp.RowwiseParallel(output_layouts=Shard(1))}
        tp.parallelize_module(block, mesh["tp"], plan)
    ends = {"tokens": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
    ends["head"] = tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return tp.parallelize_module(model, mesh["tp"], ends)


def sequence():
    return compared(in_parts, {"tp": 2})


def sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2():
    return compared(sharded, {"dp": 2})


def without_ranks(model, batch):
    """Wrong: the loss is divided by the labels of all, and FSDP divides by the ranks once more."""
    return loss(model, batch) / batch.ranks


def averaged_twice():
    return compared(sharded, {"dp": 2}, loss=without_ranks)


def hsdp():
    return compared(sharded, {"dp_replicate": 2, "dp_shard": 2})


def fsdp2_tp():
    return compared(lambda model, mesh: sharded(megatron(model, mesh), mesh["dp"]), {"dp": 2, "tp": 2})


def fsdp1():
    wrap = partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu"))
    return compared(lambda model, mesh: wrap(model, auto_wrap_policy=ModuleWrapPolicy({Block})), {"dp": 2})


def ddp():
    return compared(lambda model, mesh: DistributedDataParallel(model), {"dp": 2})


def zero(model, mesh):
    model = DistributedDataParallel(model)
    trains = [param for param in model.parameters() if param.requires_grad]
    return Parallel(model, ZeroRedundancyOptimizer(trains, torch.optim.SGD, lr=0.1, momentum=0.9))


def zero1():
    return compared(zero, {"dp": 2}, off={"saved": "its state is saved by one rank, in a way of its own"})


class Stage(nn.Module):
    """A half of the model, under the names of the whole."""

    def __init__(self, model, rank):
        super().__init__()
        self.blocks = nn.ModuleDict({str(rank): model.blocks[rank]})
        self.tokens, self.head = (model.tokens, None) if rank == 0 else (None, model.head)

    def forward(self, x):
        x = x if self.tokens is None else self.tokens(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def stages(model, mesh):
    rank = mesh["pp"].get_local_rank()
    held = Stage(model, rank)

    def run(batches):
        stage = pipelining.PipelineStage(held, rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        total = batches[0].total

        def summed(logits, labels):
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / total

        schedule = pipelining.ScheduleGPipe(stage, n_microbatches=4, loss_fn=summed, scale_grads=False)
        tokens = torch.cat([batch["input_ids"] for batch in batches])
        labels, losses = torch.cat([batch["labels"] for batch in batches]), []
        schedule.step(tokens) if rank == 0 else schedule.step(target=labels, losses=losses)
        return None if rank == 0 else float(sum(losses))

    return Parallel(held, run=run)


def pipeline():
    off = {"norm": "each stage knows its own norm", "saved": "each stage has names of its own"}
    off |= {"recomputation": "asked without stages"}
    return compared(stages, {"pp": 2}, off=off)
