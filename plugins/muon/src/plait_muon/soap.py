"""`optimizer=soap`: Adam in the eigenbasis of Shampoo's factors for the matrices of blocks, AdamW for all else.

Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv 2409.11321.

Shapes: R rows, C columns, S one of the two.
"""

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor import zeros as sharded_zeros

from plait import held_by
from plait_muon.deal import Matrix, Tile, tiles_of
from plait_muon.dealing import Dealt, Group, MatrixOptimizer, local, message_like
from plait_muon.exchange import Route, Stack, through, tile_of
from plait_muon.matrices import Matrices

# What an owner gathers of a matrix, in this order. Factors and bases are divided over all holders of the parameter.
KINDS = ("gradient", "exp_avg", "exp_avg_sq", "left", "right", "left_basis", "right_basis")
SIDES = {"left": 0, "right": 1, "left_basis": 0, "right_basis": 1}
# Of the mean of a factor's eigenvalues, added before its basis is renewed: it changes no eigenvector, and without it
# rounding would decide on the vectors of small eigenvalues, so that layouts would differ.
SHIFT, SMALLEST = 1e-2, 1e-30


class Soap(MatrixOptimizer):
    """Of each matrix the second moments of its gradient along rows and columns say in which basis Adam steps it.

    Each matrix is computed by one rank of those that hold parts or copies of it. params: groups as `Applied.groups`
    returns them. `conf/optimizer/soap.yaml` explains the options.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float = 0.1,
        matrices: bool = True,
        split: str | None = None,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        every: int = 10,
        bucket: int = 2**25,
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> None:
        chosen = {"matrices": matrices, "split": split, "bucket": bucket}
        own = {"betas": betas, "eps": eps, "every": every, "precision": "float32", "fused": fused, "foreach": foreach}
        rates = {"lr": lr, "weight_decay": weight_decay, "adamw_lr": adamw_lr, "adamw_weight_decay": adamw_weight_decay}
        super().__init__(params, {**rates, **chosen, **own})

    def check(self, group: Group) -> None:
        if group["every"] < 1:
            raise ValueError("every must be at least 1")

    def cost(self, matrices: Matrices, group: Group) -> float:
        rows, columns = matrices.shape
        renewal = 14 * (rows**3 + columns**3) / 3  # a product of matrices of n^2 (2 n^3), and its QR with Q (8 n^3 / 3)
        return 8 * rows * columns * (rows + columns) + renewal / group["every"]

    def gathered(self, group: Group, params: list[Tensor], matrices: list[Matrices], own: list[Matrix]) -> list[Matrix]:
        """The matrices themselves, and with the same owners their moments, factors and bases, as numbers of tensors."""
        tiles: dict[str, Any] = {}
        found = []
        for each in own:
            param = params[each.param]
            for kind, name in enumerate(KINDS):
                number = len(KINDS) * each.param + kind
                if name not in SIDES:
                    found.append(attrs.evolve(each, param=number, returned=name != "exp_avg"))
                    continue
                side, count = each.shape[SIDES[name]], matrices[each.param].count
                if name not in tiles:
                    held = held_by(self._state(param, matrices[each.param], group)[name], group["holders"])
                    tiles[name] = tiles_of((1, count * side, side), Matrices((1, count, 1), (side, side)), held)
                of_ranks = tiles[name][each.number]
                found.append(Matrix(number, each.number, (side, side), each.owner, of_ranks, tuple(sorted(of_ranks))))
        return found

    def step_matrices(self, group: Group, params: list[Tensor], own: Dealt, meanwhile: Callable[[], None]) -> None:
        like, beta1 = message_like(group, params[0]), group["betas"][0]
        states = [self._state(param, each, group) for param, each in zip(params, own.matrices, strict=True)]

        def held(index: int) -> Tensor:
            number, kind = divmod(index, len(KINDS))
            grad, state = local(params[number].grad), states[number]
            if KINDS[kind] == "gradient":
                local(params[number]).mul_(1 - group["lr"] * group["weight_decay"])
                local(state["exp_avg"]).lerp_(grad, 1 - beta1)
                state["step"] += 1
            return (grad if KINDS[kind] == "gradient" else local(state[KINDS[kind]])).to(like.device, like.dtype)

        def compute(route: Route, stacks: list[Stack]) -> None:
            views = {slot: view for s in stacks for slot, view in zip(s.slots, s.whole_NRC, strict=True)}
            wholes: dict[tuple[int, int], list[Tensor]] = {}
            for slot, each in enumerate(route.own):
                wholes.setdefault((each.param // len(KINDS), each.number), []).append(views[slot])
            for (number, _), tensors in wholes.items():
                update(*tensors, step=states[number]["step"], group=group)

        def put(index: int, tile: Tile, value: Tensor) -> None:
            number, kind = divmod(index, len(KINDS))
            if KINDS[kind] == "gradient":
                mine = tile_of(local(params[number]), tile)
                mine.add_(value.to(mine.device, mine.dtype), alpha=-group["lr"])
            else:
                tile_of(local(states[number][KINDS[kind]]), tile).copy_(value)

        through(own.routes, group["holders"], like, held, compute, put, meanwhile)

    def _state(self, param: Tensor, matrices: Matrices, group: Group) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            for name, dim in SIDES.items():
                side = matrices.shape[dim]
                shape = (1, matrices.count * side, side)  # of three dims: it does not lie as the parameter does
                if group["holders"] is None:
                    state[name] = torch.zeros(shape, dtype=param.dtype, device=param.device)
                else:
                    lies = {"device_mesh": group["holders"], "placements": [Shard(1)]}
                    state[name] = sharded_zeros(*shape, dtype=param.dtype, **lies).to(param.device)
        return state


def update(
    grad_RC: Tensor,
    exp_avg_RC: Tensor,
    exp_avg_sq_RC: Tensor,
    left_RR: Tensor,
    right_CC: Tensor,
    left_basis_RR: Tensor,
    right_basis_CC: Tensor,
    *,
    step: int,
    group: Group,
) -> None:
    """Change the state of a matrix in place, and its gradient to the update, to be multiplied with the rate.

    exp_avg_RC: with this gradient. exp_avg_sq_RC: in the eigenbasis. step: from 1.
    """
    beta1, beta2 = group["betas"]
    left_RR.lerp_(grad_RC @ grad_RC.mT, 1 - beta2)
    right_CC.lerp_(grad_RC.mT @ grad_RC, 1 - beta2)
    if (step - 1) % group["every"] == 0:
        for factor_SS, basis_SS in ((left_RR, left_basis_RR), (right_CC, right_basis_CC)):
            basis_SS.copy_(renewed(factor_SS, None if step == 1 else basis_SS))
    rotated_RC = left_basis_RR.mT @ grad_RC @ right_basis_CC
    exp_avg_sq_RC.mul_(beta2).addcmul_(rotated_RC, rotated_RC, value=1 - beta2)
    size_RC = (exp_avg_sq_RC / (1 - beta2**step)).sqrt() + group["eps"]
    step_RC = left_basis_RR.mT @ exp_avg_RC @ right_basis_CC / (1 - beta1**step) / size_RC
    grad_RC.copy_(left_basis_RR @ step_RC @ right_basis_CC.mT)


def renewed(factor_SS: Tensor, basis_SS: Tensor | None) -> Tensor:
    """The eigenvectors of a factor, by one step of orthogonal iteration from those of before; None: from axes."""
    eye_SS = torch.eye(len(factor_SS), dtype=factor_SS.dtype, device=factor_SS.device)
    shifted_SS = factor_SS + (SHIFT * factor_SS.diagonal().mean() + SMALLEST) * eye_SS
    new_SS, upper_SS = torch.linalg.qr(shifted_SS if basis_SS is None else shifted_SS @ basis_SS)
    return new_SS * torch.where(upper_SS.diagonal() < 0, -1.0, 1.0)  # else signs are the library's choice
