"""Plain torch code as its users write it, right and with public mistakes, for `plait.testing.compare`."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from plait.testing import Comparison, random_tokens

VOCAB, DIM = 32, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM, 1e-5)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """A token sees those before it in its document, by a mean."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(DIM, 1e-5)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, positions=None):
        x = self.tokens(tokens)
        at = torch.arange(tokens.shape[1]).expand_as(tokens) if positions is None else positions
        document = (at == 0).cumsum(1)
        sees = (document[:, :, None] == document[:, None, :]).tril().to(x.dtype)
        x = x + sees @ x / sees.sum(-1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model, batch):
    """Right: divided by the labels of all, times the ranks over which gradients are averaged."""
    logits = model(batch["input_ids"], batch.get("position_ids"))
    summed = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)
    return summed / batch.total * batch.ranks


def own_mean(model, batch):
    """Wrong: each rank and micro-batch divides by its own labels."""
    logits = model(batch["input_ids"], batch.get("position_ids"))
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) / batch.parts


def tensor_parallel(model, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    return model


def sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def in_fp8(model):
    """What the linear layers of blocks get is rounded to fp8, and backward goes past that."""

    def rounded(module, args):
        (x,) = args
        return (x + (x.to(torch.float8_e4m3fn).to(x.dtype) - x).detach(),)

    for block in model.blocks:
        block.up.register_forward_pre_hook(rounded)
        block.down.register_forward_pre_hook(rounded)
    return model


def sharded_in_fp8(model, mesh):
    return sharded(in_fp8(model), mesh)


def flat(orig):
    def parallelize(model, mesh):
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=orig, device_id=torch.device("cpu")
        )

    return parallelize


def replicated(model, mesh):
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group())


def both(model, mesh):
    return sharded(tensor_parallel(model, mesh), mesh)


RIGHT = {  # set-up -> (parallelize, mesh)
    "tp": (tensor_parallel, {"tp": 2}),
    "ddp": (replicated, {"dp": 2}),
    "fsdp2": (sharded, {"dp": 2}),
    "fsdp1": (flat(False), {"dp": 2}),
    "fsdp1 with the original parameters": (flat(True), {"dp": 2}),
    "fsdp2 x tp": (both, {"dp": 2, "tp": 2}),
}


def comparison(parallelize, mesh, **changed):
    batch = random_tokens(VOCAB, shifted=True)
    given = {"build": Tiny, "batch": batch, "packed": batch.packed, "loss": loss, **changed}
    return Comparison(parallelize=parallelize, mesh=mesh, **given)


def right(name, **changed):
    parallelize, mesh = RIGHT[name]
    off = {"frozen": "a flat parameter trains as one"} if name == "fsdp1" else {}
    return comparison(parallelize, mesh, **{"off": off, **changed})
