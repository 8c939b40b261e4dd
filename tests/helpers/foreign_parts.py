"""Plain torch code whose ranks have a part of the vocabulary, or of the experts: right, and with public mistakes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from plait.testing import Parallel
from tests.helpers import foreign

SMOOTHED, EXPERTS, CHOSEN = 0.1, 4, 2


class Summed(torch.autograd.Function):
    """The sum over ranks, whose gradient is that of each summand. group: None: of all ranks."""

    @staticmethod
    def forward(ctx, x, group=None):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Copied(torch.autograd.Function):
    """The same on each rank, whose gradient is the sum over ranks. group: None: of all ranks."""

    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def divided_head(model, mesh):
    """Each rank has the logits of its part of the vocabulary."""
    return parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Shard(-1))})


def smoothed(whole):
    """A loss that smooths labels, over all of the vocabulary or over a rank's part of it."""

    def loss(model, batch):
        logits, labels = model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        own, counts = logits.shape[-1], labels != -100
        if own == foreign.VOCAB:
            summed = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=SMOOTHED)
            return summed / batch.total
        at = labels - dist.get_rank() * own
        mine = (at >= 0) & (at < own)
        picked = logits.gather(1, at.clamp(0, own - 1)[:, None])[:, 0] * mine
        entropy = Summed.apply(logits.exp().sum(-1)).log()
        mean = Summed.apply(logits.sum(-1)) / foreign.VOCAB if whole else logits.mean(-1)
        losses = entropy - (1 - SMOOTHED) * Summed.apply(picked) - SMOOTHED * mean
        return (losses * counts).sum() / batch.total

    return loss


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, foreign.DIM) / 4)

    def forward(self, x):
        weights, chosen = F.linear(x, self.weight).softmax(-1).topk(CHOSEN)
        return weights, chosen


class Experts(nn.Module):
    """hidden: whether places of experts that this rank does not have are left out of what it computes."""

    def __init__(self):
        super().__init__()
        self.weight, self.hidden = nn.Parameter(torch.randn(EXPERTS, foreign.DIM, foreign.DIM) / 4), True

    def forward(self, x, chosen, weights):
        if self.hidden:
            weights = weights.masked_fill(chosen == len(self.weight), 0)
        found = torch.einsum("...d,...kde->...ke", x, self.weight[chosen.clamp(max=len(self.weight) - 1)])
        return (found.tanh() * weights[..., None]).sum(-2)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = Router(), Experts()

    def forward(self, x):
        weights, chosen = self.router(x)
        return x + self.experts(x, chosen, weights)


class Mixed(foreign.Tiny):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))


def divided_experts(hidden):
    """Each rank has a part of the experts, and counts a place only if it has the expert."""

    def parallelize(model, mesh):
        rank, own = mesh.get_rank(), EXPERTS // mesh.size()

        def chooses(module, args, found):
            weights, chosen = found
            there = chosen // own == rank
            return Copied.apply(weights).masked_fill(~there, 0), torch.where(there, chosen % own, own)

        def copied(module, args):
            x, chosen, weights = args
            return Copied.apply(x), chosen, Copied.apply(weights)

        for block in model.blocks:
            block.experts.hidden = hidden
            block.experts.weight = nn.Parameter(block.experts.weight.detach()[rank * own : (rank + 1) * own].clone())
            block.router.register_forward_hook(chooses)
            block.experts.register_forward_pre_hook(copied)
            block.experts.register_forward_hook(lambda module, args, found: Summed.apply(found))
        return Parallel(model, shards={"*.experts.weight": (0, "tp")})

    return parallelize
