"""Public mistakes in their smallest form, as plain torch code: what `plait verify` must say of each.

The reports are those of docs/silent-bugs.md.
"""

from typing import Any

import attrs
import torch
from torch import nn

from plait import whole_tensor
from plait.testing import Parallel
from tests.helpers import foreign, foreign_parts


@attrs.frozen
class Bug:
    """A mistake, and what is said of it. question: the first that is wrong of those about gradients; or the only one
    that is wrong, if no gradient is. parameter, kind, axis: of the first wrong parameter; none if no gradient is."""

    report: str
    parallelize: Any
    mesh: dict[str, int]
    question: str
    parameter: str = ""
    kind: str = ""
    axis: str = ""
    changes: dict[str, Any] = attrs.Factory(dict)


def unsummed(model, mesh):
    """A norm's weight inside of what tensor ranks divide: each has the gradient of its part."""
    foreign.tensor_parallel(model, mesh)
    for block in model.blocks:
        block.norm.weight.register_hook(lambda g: g * (mesh.get_rank() == 0))
    return model


def twice(model, mesh):
    return Parallel(foreign.replicated(model, mesh), backward=lambda loss: (loss / 2).backward())


def alone(model, mesh):
    return model


def dead(model, mesh):
    model.tokens.register_forward_hook(lambda module, args, output: output.detach())
    return foreign.replicated(model, mesh)


def too_long(model, mesh):
    made = foreign.sharded(model, mesh)
    clip = nn.utils.clip_grad_norm_
    return Parallel(made, clip=lambda largest: 2 * whole_tensor(clip(made.parameters(), largest)))


def forgets(model, mesh):
    """What is saved is not what is loaded: one weight stays as it was."""
    made = foreign.sharded(model, mesh)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    kept = {}

    def save(folder):
        torch.save({n: p.to_local() for n, p in made.named_parameters()}, f"{folder}-{mesh.get_rank()}.pt")

    def load(folder):
        kept.update(torch.load(f"{folder}-{mesh.get_rank()}.pt"))
        with torch.no_grad():
            for name, param in made.named_parameters():
                if name != "norm.weight":
                    param.to_local().copy_(kept[name])

    return Parallel(made, optimizer=optimizer, save=save, load=load)


def shifted_late(model, batch):
    """Each sequence rank shifts its own part of the labels, and borders are lost."""
    labels = batch["labels"].clone()
    if batch.ranks > 1:
        labels[:, labels.shape[1] // 2 - 1] = -100
    return foreign.loss(model, type(batch)({**batch, "labels": labels}, batch.total, batch.ranks, batch.parts))


def left_out(model, mesh):
    """One weight is left out of the reduction."""
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["blocks.1.up.weight"])
    return foreign.replicated(model, mesh)


def summed(model, batch):
    """Backward runs on the sum, which is divided afterwards, for the log."""
    loss = foreign.loss(model, batch)
    return loss if batch.ranks == 1 else loss * batch.total


def own_norm(model, mesh):
    """The norm of this rank's shards."""
    made = foreign.sharded(model, mesh)

    def clip(largest):
        grads = [param.grad.to_local() for param in made.parameters()]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_((largest / (norm + 1e-6)).clamp(max=1.0))
        return norm

    return Parallel(made, clip=clip)


def without_borders(model, mesh):
    """Positions do not reach attention, so that packed documents see each other."""
    forward = model.forward
    model.forward = lambda tokens, positions=None: forward(tokens)
    return foreign.replicated(model, mesh)


def times_ranks(model, batch):
    """The loss counts once for every rank that sees the same tokens."""
    return foreign.loss(model, batch) * (2 if torch.distributed.get_world_size() > 1 else 1)


def only_last(model, mesh):
    """Accumulation writes over what was summed before."""
    made = foreign.replicated(model, mesh)

    def backward(loss):
        for param in made.parameters():
            param.grad = None
        loss.backward()

    return Parallel(made, backward=backward)


def again(model, mesh):
    """The gradient of a norm that sees a part is summed after each backward, with what was summed before."""
    made = foreign.tensor_parallel(model, mesh)
    for block in made.blocks:
        block.norm.weight.register_hook(lambda grad: grad / 2)  # its copies have the whole; so each has a summand
        block.norm.weight.register_post_accumulate_grad_hook(
            lambda weight: torch.distributed.all_reduce(weight.grad, group=mesh["tp"].get_group())
        )
    return made


BUGS = {
    "a norm is not summed over tensor ranks": Bug(
        "TransformerEngine #435", unsummed, {"tp": 2}, "gradients", "blocks.0.norm.weight", "not summed", "tp"
    ),
    "averaged by the loss and by the reduction": Bug(
        "torchtune #2172", twice, {"dp": 2}, "gradients", "tokens.weight", "divided", "dp"
    ),
    "data ranks are not summed": Bug(
        "Lightning #18086", alone, {"dp": 2}, "gradients", "tokens.weight", "not summed", "dp"
    ),
    "one weight is left out": Bug(
        "DeepSpeed #4482", left_out, {"dp": 2}, "gradients", "blocks.1.up.weight", "not summed", "dp"
    ),
    "means of unequal counts": Bug(
        *("torchtune #1875", foreign.replicated, {"dp": 2}, "unequal", "tokens.weight", "own counts", ""),
        {"loss": foreign.own_mean},
    ),
    "labels shifted after the split": Bug(
        *("transformers #36607", foreign.replicated, {"dp": 2}, "gradients", "tokens.weight"),
        *("labels shifted after the split", "", {"loss": shifted_late}),
    ),
    "backward on the sum": Bug(
        *("torchtitan #2972", foreign.replicated, {"dp": 2}, "gradients", "tokens.weight", "scaled", ""),
        {"loss": summed},
    ),
    "the loss counts once for every tensor rank": Bug(
        *("transformers #45994", foreign.tensor_parallel, {"tp": 2}, "gradients", "tokens.weight", "multiplied", "tp"),
        {"loss": times_ranks},
    ),
    "accumulation writes over the sum": Bug(
        "DeepSpeed #6550", only_last, {"dp": 2}, "accumulation", "tokens.weight", "earlier lost"
    ),
    "summed once more with each micro-batch": Bug(
        "transformers 5.23", again, {"tp": 2}, "accumulation", "blocks.0.norm.weight", "reduced again"
    ),
    "packed documents see each other": Bug(
        *("transformers #46634", without_borders, {"dp": 2}, "documents"),
        *("tokens.weight", "documents see each other"),
    ),
    "labels smoothed over a part of the vocabulary": Bug(
        *("Megatron-LM #7464", foreign_parts.divided_head, {"tp": 2}, "gradients", "tokens.weight"),
        *("part of the vocabulary", "tp", {"loss": foreign_parts.smoothed(whole=False)}),
    ),
    "places of other ranks' experts learn": Bug(
        *("transformers #48687", foreign_parts.divided_experts(hidden=False), {"tp": 2}, "gradients", "tokens.weight"),
        *("masked places", "tp", {"build": foreign_parts.Mixed}),
    ),
    "dead gradients": Bug("a parity test on dead models", dead, {"dp": 2}, "gradients", "tokens.weight", "dead"),
    "a norm of one rank's shards": Bug("AReaL #312", own_norm, {"dp": 2}, "norm"),
    "a norm that is twice too long": Bug("DeepSpeed #7847", too_long, {"dp": 2}, "norm"),
    "a weight that is not loaded": Bug("transformers #31034", forgets, {"dp": 2}, "saved"),
}
