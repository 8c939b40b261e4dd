"""NorMuon's second moments: of each row of each orthogonalised matrix, the mean of its squares.

Every rank keeps those of all matrices that it holds a part of, since they are small; each is computed by the owner.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait_muon.deal import Matrix
from plait_muon.matrices import Matrices

EPS = 1e-8


class Rows:
    """The moments of the matrices of `params` in one step. states: of each parameter, which keep them as `rows`."""

    def __init__(self, params: Sequence[Any], matrices: Sequence[Matrices], states: Sequence[dict[str, Any]]) -> None:
        self.kept_MR = []
        for param, each, state in zip(params, matrices, states, strict=True):
            if "rows" not in state:
                dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
                state["rows"] = torch.zeros(each.count, each.shape[0], dtype=dtype, device=param.device)
            self.kept_MR.append(state["rows"])
        self.new_MR = [torch.zeros_like(kept_MR) for kept_MR in self.kept_MR]

    def normed(self, x_NRC: Tensor, matrices: Sequence[Matrix], beta2: float) -> Tensor:
        """`x_NRC`, rows divided by the root of their moments, and each matrix by its norm then."""
        kept_NR = torch.stack([self.kept_MR[each.param][each.number] for each in matrices])
        x_NRC = x_NRC.to(kept_NR.dtype)
        new_NR = kept_NR.to(x_NRC.device).lerp(x_NRC.square().mean(-1), 1 - beta2)
        for each, new_R in zip(matrices, new_NR, strict=True):
            self.new_MR[each.param][each.number] = new_R
        x_NRC = x_NRC / (new_NR.sqrt() + EPS).unsqueeze(-1)
        return x_NRC / x_NRC.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)

    def share(self, holders: Any) -> None:
        """Keep the new moments, of which each rank has computed some. Collective over `holders`."""
        every = torch.cat([new_MR.flatten() for new_MR in self.new_MR])
        if holders is not None:
            every = every.to(holders.device_type)
            dist.all_reduce(every, group=holders.get_group())  # all others have zero, so the sum is exact
        parts = every.split([kept_MR.numel() for kept_MR in self.kept_MR])
        for kept_MR, part in zip(self.kept_MR, parts, strict=True):
            kept_MR.copy_(part.view_as(kept_MR))
