"""`optimizer=muon`: Muon for the matrices of blocks, AdamW for all else.

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", kellerjordan.github.io/posts/muon;
Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982: weight decay, and updates as large as AdamW's;
Li et al., "NorMuon: Making Muon more efficient and scalable", arXiv 2510.05491: second moments of rows;
Ahn et al., "Dion: Distributed Orthonormalized Updates", arXiv 2504.05295, and its repository: each rank orthogonalises
whole matrices of its own, which an all-to-all brings there.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from plait_muon.deal import Tile
from plait_muon.dealing import Dealt, Group, MatrixOptimizer, local, message_like
from plait_muon.exchange import Route, Stack, through, tile_of
from plait_muon.matrices import Matrices
from plait_muon.newton_schulz import flops, newton_schulz
from plait_muon.rows import Rows

SCALES: dict[str, Callable[[int, int], float]] = {
    "rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "rows": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "spectral": lambda rows, columns: math.sqrt(rows / columns),
}


class Muon(MatrixOptimizer):
    """A matrix of a block moves along its orthogonalised momentum, another parameter as AdamW says.

    Each matrix is orthogonalised by one rank of those that hold parts or copies of it. params: groups as
    `Applied.groups` returns them. `conf/optimizer/muon.yaml` explains the options.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float = 0.1,
        matrices: bool = True,
        split: str | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        iterations: int = 5,
        scale: str = "rms",
        normuon: bool = False,
        beta2: float = 0.95,
        precision: str = "bfloat16",
        bucket: int = 2**25,
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> None:
        chosen = {"matrices": matrices, "split": split, "bucket": bucket}
        own = {"momentum": momentum, "nesterov": nesterov, "iterations": iterations, "precision": precision}
        variant = {"scale": scale, "normuon": normuon, "beta2": beta2}
        of_adamw = {"adamw_lr": adamw_lr, "adamw_weight_decay": adamw_weight_decay, "betas": betas, "eps": eps}
        rates = {"lr": lr, "weight_decay": weight_decay, "fused": fused, "foreach": foreach}
        super().__init__(params, {**rates, **chosen, **own, **variant, **of_adamw})

    def check(self, group: Group) -> None:
        for key in ("momentum", "beta2"):
            if not 0 <= group[key] < 1:
                raise ValueError(f"{key} must be at least 0 and below 1")
        if group["scale"] not in SCALES:
            raise ValueError(f"scale must be one of {', '.join(SCALES)}")
        if group["iterations"] < 1:
            raise ValueError("iterations must be at least 1")

    def cost(self, matrices: Matrices, group: Group) -> float:
        return flops(*matrices.shape, group["iterations"])

    def step_matrices(self, group: Group, params: list[Tensor], own: Dealt, meanwhile: Callable[[], None]) -> None:
        like = message_like(group, params[0])
        rows = Rows(params, own.matrices, [self.state[p] for p in params]) if group["normuon"] else None

        def moved(index: int) -> Tensor:
            local(params[index]).mul_(1 - group["lr"] * group["weight_decay"])
            return self._momentum(params[index], group).to(like.device, like.dtype)

        def compute(route: Route, stacks: list[Stack]) -> None:
            for stack in stacks:
                shape = stack.whole_NRC.shape[-2:]
                result_NRC = newton_schulz(stack.whole_NRC, group["iterations"])
                factor = SCALES[group["scale"]](*shape)
                if rows is not None:  # as long as they would be without
                    result_NRC = rows.normed(result_NRC, [route.own[slot] for slot in stack.slots], group["beta2"])
                    factor *= math.sqrt(min(shape))
                stack.whole_NRC.copy_(result_NRC * factor)

        def put(index: int, tile: Tile, value: Tensor) -> None:
            own = tile_of(local(params[index]), tile)
            own.add_(value.to(own.device, own.dtype), alpha=-group["lr"])

        through(own.routes, group["holders"], like, moved, compute, put, meanwhile)
        if rows is not None:
            rows.share(group["holders"])

    def _momentum(self, param: Tensor, group: Group) -> Tensor:
        """What this rank holds of the momentum, with the gradient of this step."""
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        kept, grad, decay = local(state["momentum_buffer"]), local(param.grad), group["momentum"]
        kept.lerp_(grad, 1 - decay)
        return grad.lerp(kept, decay) if group["nesterov"] else kept
