"""Tensors without values stand for those of the model: same sizes, and what is tied stays tied."""

import torch
from torch import nn

from plait_plan.tracing.fake import fake, materialise_fake


def test_parameters_keep_their_dtypes_strides_and_ties() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, dtype=torch.bfloat16)})
        model.embed.weight = model.head.weight
        model.other = nn.Parameter(torch.empty(3, 5, dtype=torch.float64).T, requires_grad=False)
    with fake() as mode:
        materialise_fake(model, mode, "cpu")
    assert model.embed.weight is model.head.weight
    found = {name: (p.dtype, p.stride(), p.requires_grad, p.device.type) for name, p in model.named_parameters()}
    assert found == {
        "embed.weight": (torch.bfloat16, (4, 1), True, "cpu"),
        "head.bias": (torch.bfloat16, (1,), True, "cpu"),
        "other": (torch.float64, (1, 5), False, "cpu"),
    }
