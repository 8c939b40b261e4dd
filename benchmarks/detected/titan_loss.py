"""torchtitan 0.2.0: its loss is the mean over the labels of a rank's micro-batch, divided by the micro-batches."""

import attrs
from titan_ddp import ddp
from torchtitan.components.loss import cross_entropy_loss, rescale_accumulated_loss


def loss(model, batch):
    labels = batch["labels"]
    return rescale_accumulated_loss(cross_entropy_loss, batch.parts)(model(batch["input_ids"]), labels)


def fsdp():
    return attrs.evolve(ddp(), loss=loss, mesh={"dp_shard": 2}, data=("dp_shard",), losses="mean")
