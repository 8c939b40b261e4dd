"""The optimizer: Muon for the matrices of blocks, AdamW for all else.

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", kellerjordan.github.io/posts/muon;
Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982: weight decay, and updates as large as AdamW's.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from plait_muon.newton_schulz import orthogonal

Group = dict[str, Any]


class Muon(torch.optim.Optimizer):
    """A matrix of a block moves along its orthogonalised momentum, another parameter as AdamW says.

    The stacked matrices of experts count one by one. params: groups as `Applied.groups` returns them.
    `conf/optimizer/muon.yaml` explains the options.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float = 0.1,
        matrices: bool = True,
        momentum: float = 0.95,
        nesterov: bool = True,
        iterations: int = 5,
        precision: str = "bfloat16",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> None:
        own = {"matrices": matrices, "momentum": momentum, "nesterov": nesterov, "iterations": iterations}
        of_adamw = {"betas": betas, "eps": eps, "fused": fused, "foreach": foreach}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **own, "precision": precision, **of_adamw})
        for group in self.param_groups:
            if not {"names", "logical", "block"} <= group.keys():
                raise ValueError(
                    "it must be told which parameters are in blocks: give it the groups of applied.groups()"
                )
            if group["precision"] not in ("bfloat16", "float32"):
                raise ValueError("precision must be bfloat16 or float32")
            if not 0 <= group["momentum"] < 1:
                raise ValueError("momentum must be at least 0 and below 1")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override] # a run passes no closure
        for group in self.param_groups:
            trained = [i for i, param in enumerate(group["params"]) if param.grad is not None]
            self._step_others([group["params"][i] for i in trained if not is_matrix(group, i)], group)
            for params in of_one_kind([group["params"][i] for i in trained if is_matrix(group, i)]):
                self._step_matrices(params, group)

    def _step_matrices(self, params: list[Tensor], group: Group) -> None:
        """params: matrices of one shape and placement, or one parameter of experts."""
        like, lr = params[0], group["lr"]
        device = like.device_mesh.device_type if isinstance(like, DTensor) else like.device
        dtype = like.dtype if like.dtype == torch.float64 else getattr(torch, group["precision"])
        updates = [self._momentum(param, group).to(device, dtype) for param in params]
        scale = 0.2 * math.sqrt(max(like.shape[-2:]))  # to the root mean square of AdamW's updates
        for param, update in zip(params, orthogonal(updates, like, group["iterations"]), strict=True):
            own = local(param).mul_(1 - lr * group["weight_decay"])
            own.add_(update.to(own.device, own.dtype), alpha=-lr * scale)

    def _momentum(self, param: Tensor, group: Group) -> Tensor:
        """What this rank holds of the momentum, with the gradient of this step."""
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        kept, grad, decay = local(state["momentum_buffer"]), local(param.grad), group["momentum"]
        kept.lerp_(grad, 1 - decay)
        return grad.lerp(kept, decay) if group["nesterov"] else kept

    def _step_others(self, params: list[Tensor], group: Group) -> None:
        states = [self.state[param] for param in params]
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


def is_matrix(group: Group, number: int) -> bool:
    """Whether parameter `number` of a group is a matrix of a block, or the matrices of experts, one per row."""
    param, logical = group["params"][number], group["logical"][number]
    wanted = group["matrices"] and group["block"][number] is not None
    return wanted and (param.dim() == 2 or (param.dim() == 3 and logical[0] == "experts"))


def of_one_kind(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of at most as many matrices of one shape and placement as ranks can compute at once; experts alone."""
    kinds: dict[Any, list[Tensor]] = {}
    for param in params:
        kinds.setdefault((param.shape, param.dtype, getattr(param, "placements", None)), []).append(param)
    for alike in kinds.values():
        like = alike[0]
        most = like.device_mesh.size() if isinstance(like, DTensor) and like.dim() == 2 else 1
        for first in range(0, len(alike), most):
            yield alike[first : first + most]


def local(tensor: Any) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
