"""An optimizer of whole matrices: its groups, and the deal of their matrices in buckets."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from plait_muon import adamw
from plait_muon.deal import Matrix, dealt
from plait_muon.exchange import Route
from plait_muon.matrices import SPLITS, Matrices, are_matrices

Group = dict[str, Any]
NEEDED = {"names", "logical", "block", "units", "holders"}
EACH = ("params", "names", "logical", "block", "units")


@attrs.frozen
class Dealt:
    """The matrices of the parameters of one group, in buckets, and how each parameter divides into matrices."""

    matrices: list[Matrices]
    routes: list[Route]


class MatrixOptimizer(torch.optim.Optimizer):
    """Divides each group into one of matrices (`whole`) and one that AdamW steps with a rate and decay of its own.

    params: groups as `Applied.groups` returns them.
    """

    def __init__(self, params: Iterable[Any], options: dict[str, Any]) -> None:
        params = list(params)
        own = [set(group) if isinstance(group, dict) else set() for group in params]  # before defaults fill them
        super().__init__(params, options)
        self._deals: dict[Any, list[Dealt]] = {}
        self._loads: list[float] = []  # of each of the holders, in all deals
        if options["adamw_weight_decay"] and not options["weight_decay"]:  # no group tells which vectors are spared
            raise ValueError("adamw_weight_decay needs a weight_decay above 0: optimizer.groups decays others alone")
        given, self.param_groups = self.param_groups, []
        for group, said in zip(given, own, strict=True):
            if not group.keys() >= NEEDED:
                raise ValueError(
                    "it must be told which parameters are in blocks: give it the groups of applied.groups()"
                )
            if group["precision"] not in ("bfloat16", "float32"):
                raise ValueError("precision must be bfloat16 or float32")
            if group["split"] not in SPLITS:
                raise ValueError("split must be null, parts or heads")
            if group["bucket"] < 1:
                raise ValueError("bucket must be at least 1")
            adamw.check(group)
            self.check(group)
            whole = [bool(group["matrices"]) and self._is_whole(group, i) for i in range(len(group["params"]))]
            for wanted in (True, False):
                if numbers := [i for i, each in enumerate(whole) if each == wanted]:
                    part = {**group, **{key: [group[key][i] for i in numbers] for key in EACH}, "whole": wanted}
                    if not wanted:
                        for key in ("lr", "weight_decay"):  # the value that a group has for itself counts
                            if group[f"adamw_{key}"] is not None and key not in said:
                                part[key] = group[f"adamw_{key}"]
                    self.param_groups.append(part)

    def check(self, group: Group) -> None:
        """Raises ValueError for an option of this optimizer that does not fit."""

    def cost(self, matrices: Matrices, group: Group) -> float:
        """Of the computation of one of them."""
        raise NotImplementedError

    def gathered(self, group: Group, params: list[Tensor], matrices: list[Matrices], own: list[Matrix]) -> list[Matrix]:
        """What owners gather for the matrices `own` of a parameter: one that keeps more than `params` say adds it."""
        return own

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override] # a run passes no closure
        trained, meanwhile = self.trained(), self.step_others
        for (group, numbers), own in zip(trained, self.deal(trained), strict=True):
            self.step_matrices(group, [group["params"][i] for i in numbers], own, meanwhile)
            meanwhile = _nothing
        meanwhile()

    def step_matrices(self, group: Group, params: list[Tensor], own: Dealt, meanwhile: Callable[[], None]) -> None:
        """Step the matrices of one group. meanwhile: called while the first of them are gathered."""
        raise NotImplementedError

    def step_others(self) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not group["whole"] and params:
                adamw.step(params, [self.state[param] for param in params], group)

    def trained(self) -> list[tuple[Group, list[int]]]:
        """The groups of matrices, each with the numbers of its parameters that have gradients."""
        every = [group for group in self.param_groups if group["whole"]]
        numbers = [[i for i, param in enumerate(group["params"]) if param.grad is not None] for group in every]
        return [(group, own) for group, own in zip(every, numbers, strict=True) if own]

    def deal(self, trained: list[tuple[Group, list[int]]]) -> list[Dealt]:
        """The deal of the matrices of each group; the same every time. A step may come in pieces, of other parameters
        each: whoever rounds what the optimizer keeps steps some at a time."""
        key = tuple(tuple(group["names"][i] for i in numbers) for group, numbers in trained)
        if key not in self._deals:
            self._deals[key] = self._dealt(trained)
        return self._deals[key]

    def _dealt(self, trained: list[tuple[Group, list[int]]]) -> list[Dealt]:
        found = []
        holders = trained[0][0]["holders"] if trained else None
        ranks, rank = (holders.size(), holders.get_local_rank()) if holders is not None else (1, 0)
        self._loads = self._loads or [0.0] * ranks
        for group, numbers in trained:
            params = [group["params"][i] for i in numbers]
            matrices = [
                Matrices.of(tuple(group["params"][i].shape), group["logical"][i], group["units"][i], group["split"])
                for i in numbers
            ]
            costs = [self.cost(each, group) for each in matrices]
            order = sorted(range(len(params)), key=lambda i: -costs[i])
            mine = dealt(params, matrices, holders, costs, self._loads, order)
            buckets: list[list[Matrix]] = []
            room = 0
            for own in mine:
                if room <= 0:
                    buckets.append([])
                    room = group["bucket"] * ranks
                gathered = self.gathered(group, params, matrices, own)
                buckets[-1] += gathered
                room -= sum(math.prod(each.shape) for each in gathered)
            found.append(Dealt(matrices, [Route.of(bucket, rank, ranks) for bucket in buckets]))
        return found

    def _is_whole(self, group: Group, number: int) -> bool:
        shape = tuple(group["params"][number].shape)
        return are_matrices(shape, group["logical"][number], group["block"][number])


def local(tensor: Any) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def message_like(group: Group, param: Tensor) -> Tensor:
    """An empty tensor of the device and dtype in which matrices of a group are sent and computed."""
    device = group["holders"].device_type if group["holders"] is not None else param.device
    dtype = param.dtype if param.dtype == torch.float64 else getattr(torch, group["precision"])
    return torch.empty(0, device=device, dtype=dtype)


def _nothing() -> None:
    pass
