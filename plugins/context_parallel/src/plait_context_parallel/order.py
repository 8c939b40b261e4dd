"""Which tokens of a sequence each rank has: stretches of equal length, one per rank, or two in zigzag order.

Zigzag gives rank r of R the stretches r and 2R - 1 - r of 2R: an early and a late one. Under a causal mask all ranks
then have the same number of pairs to compute; in contiguous order the last rank has most of them.
"""

from typing import Any

import attrs
import torch
from torch import Tensor

from plait_context_parallel.fits import stretches


@attrs.frozen
class Order:
    """Of `ranks` ranks, of which this one is `rank`. name: "zigzag" or "contiguous"."""

    ranks: int
    rank: int
    name: str

    @classmethod
    def on(cls, axis: Any, name: str) -> "Order":
        """axis: 1-D DeviceMesh."""
        return cls(axis.size(), axis.get_local_rank(), name)

    @property
    def parts(self) -> int:
        """Stretches of a sequence."""
        return stretches(self.ranks, self.name)

    def of(self, rank: int) -> list[int]:
        """The numbers of a rank's stretches, ascending."""
        return [rank, self.parts - 1 - rank] if self.name == "zigzag" else [rank]

    def own(self, whole_BT: Tensor) -> Tensor:
        """This rank's tokens of `whole_BT`, along dim 1."""
        pieces = whole_BT.chunk(self.parts, dim=1)
        return torch.cat([pieces[number] for number in self.of(self.rank)], dim=1)

    def places(self, tokens: int, rank: int, device: torch.device | None = None) -> Tensor:
        """The places in the sequence of the `tokens` tokens of a rank, (tokens,) int64."""
        length = tokens // len(self.of(rank))
        return torch.cat([torch.arange(n * length, (n + 1) * length, device=device) for n in self.of(rank)])

    def begins(self, positions_BT: Tensor) -> Tensor:
        """The place at which the document of each of this rank's tokens begins, (B, T)."""
        return self.places(positions_BT.shape[1], self.rank, positions_BT.device) - positions_BT

    def whole(self, by_rank: Tensor, dim: int) -> Tensor:
        """All ranks' tokens, one rank after the other along `dim`, in the order of the sequence."""
        numbers = [number for rank in range(self.ranks) for number in self.of(rank)]
        pieces = by_rank.chunk(self.parts, dim=dim)
        return torch.cat([pieces[numbers.index(number)] for number in range(self.parts)], dim=dim)

    def by_rank(self, whole: Tensor, dim: int) -> Tensor:
        """The reverse of `whole`."""
        pieces = whole.chunk(self.parts, dim=dim)
        return torch.cat([pieces[number] for rank in range(self.ranks) for number in self.of(rank)], dim=dim)
