"""torchtitan 0.2.2 under DDP: its loss is divided by the tokens of all ranks, and DDP averages once more."""

import torch
import torch.nn.functional as F
import torchtitan.distributed.parallel_dims as dims
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama

from plait.testing import Comparison, random_tokens

dims.device_type = "cpu"  # without a GPU torchtitan takes "cuda"
TORCH_DTYPE_MAP["float64"] = torch.float64  # of its mixed precision


def build():
    return Transformer(
        TransformerModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=64, max_seq_len=64, multiple_of=8)
    )


def parallelize(model, mesh):
    config = JobConfig()
    config.training.seq_len = 16
    config.training.mixed_precision_param = str(next(model.parameters()).dtype).removeprefix("torch.")
    config.training.mixed_precision_reduce = config.training.mixed_precision_param
    config.activation_checkpoint.mode = "none"
    config.parallelism.disable_loss_parallel = True  # `loss` below takes whole logits
    ones = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1)
    named = {axis: mesh[axis].size() for axis in mesh.mesh_dim_names}
    return parallelize_llama(model, dims.ParallelDims(**{**ones, **named}, world_size=mesh.size()), config)


def loss(model, batch):
    logits, labels = model(batch["input_ids"]), batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / batch.total


def ddp():
    batch, mesh = random_tokens(vocab=64, shifted=True), {"dp_replicate": 2}
    given = {"build": build, "parallelize": parallelize, "batch": batch, "loss": loss}
    return Comparison(**given, mesh=mesh, losses="sum", data=("dp_replicate",))
