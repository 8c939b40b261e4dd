"""AdamW for the parameters that are no matrices, by torch's own kernels."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

POSITIVE = ("eps", "weight_decay", "adamw_lr", "adamw_weight_decay")


def check(options: dict[str, Any]) -> None:
    """Raises ValueError for an option that no AdamW can have. Some optimizers have not all of them."""
    if not all(0 <= beta < 1 for beta in options["betas"]):
        raise ValueError("betas must be at least 0 and below 1")
    for key in POSITIVE:
        if (options.get(key) or 0) < 0:
            raise ValueError(f"{key} must be at least 0")


def step(params: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]) -> None:
    """Step the `params`, which have gradients. states: of each, filled by the first step. group: their options."""
    for param, state in zip(params, states, strict=True):
        if not state:
            fused_on = param.device if group["fused"] else "cpu"  # where torch's kernels want the number of steps
            state["step"] = torch.zeros((), device=fused_on)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
    adamw(
        params,
        [param.grad for param in params if param.grad is not None],
        exp_avgs=[state["exp_avg"] for state in states],
        exp_avg_sqs=[state["exp_avg_sq"] for state in states],
        max_exp_avg_sqs=[],
        state_steps=[state["step"] for state in states],
        amsgrad=False,
        maximize=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        fused=group["fused"],
        foreach=group["foreach"],
    )
