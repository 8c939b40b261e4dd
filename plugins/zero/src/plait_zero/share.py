"""The share of a parameter that a rank updates, and how the shares of all ranks lie side by side in one tensor."""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from plait import Mesh, PlaitError, own_chunk, shard_dim
from plait_zero.torch_internals import joined, strided


@attrs.frozen(eq=False)
class Share:
    """Of one parameter, whose part on this rank the ranks of `group` all hold, and divide along `dim`.

    shape: of that part, the same on all of these ranks. length: of the shares along `dim`; the last ones may be
    shorter, or empty. mesh, placements, whole, stride: of the DTensor that the shares make up.
    """

    group: dist.ProcessGroup
    ranks: int
    rank: int
    dim: int
    shape: torch.Size
    length: int
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    whole: torch.Size
    stride: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Of the longest share."""
        return self.shape.numel() // max(self.shape[self.dim], 1) * self.length

    def own(self, part: Tensor) -> Tensor:
        """This rank's share, a view of `part`."""
        return own_chunk(part, self.ranks, self.rank, self.dim)

    def rows(self, part: Tensor) -> Tensor:
        """(ranks, elements): the shares of `part`, one under the other, with zeros where one is shorter."""
        missing = self.ranks * self.length - part.shape[self.dim]
        padded = F.pad(part, (0, 0) * (part.dim() - self.dim - 1) + (0, missing)) if missing else part
        return padded.unflatten(self.dim, (self.ranks, self.length)).movedim(self.dim, 0).reshape(self.ranks, -1)

    def from_rows(self, rows: Tensor) -> Tensor:
        """The part that `rows` are the shares of."""
        shape = [*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :]]
        padded = rows.view(self.ranks, *shape).movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        return padded.narrow(self.dim, 0, self.shape[self.dim])

    def row(self, share: Tensor) -> Tensor:
        """(elements,): this rank's row of `rows`, from its share."""
        missing = self.length - share.shape[self.dim]
        padded = F.pad(share, (0, 0) * (share.dim() - self.dim - 1) + (0, missing)) if missing else share
        return padded.reshape(-1)

    def from_row(self, row: Tensor) -> Tensor:
        """This rank's share, from its row."""
        shape = [*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :]]
        own = min(self.length, max(self.shape[self.dim] - self.rank * self.length, 0))
        return row.view(shape).narrow(self.dim, 0, own)

    def placed(self, share: Tensor) -> DTensor:
        """All ranks' shares as one DTensor."""
        mesh, placements = self.mesh, self.placements
        return DTensor.from_local(share, mesh, placements, run_check=False, shape=self.whole, stride=self.stride)

    def is_placed(self, tensor: Any) -> bool:
        return isinstance(tensor, DTensor) and tensor.device_mesh == self.mesh and tensor.placements == self.placements


class Shares:
    """The share of each parameter, None if no other rank sums its gradient. It joins each pair of meshes once, which
    takes torch as long as there are ranks; in `parallelize`, because a plan has no values to make meshes from later."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._join: Callable[..., DeviceMesh] = functools.cache(joined)

    def of(self, name: str, param: nn.Parameter) -> Share | None:
        """Raises PlaitError for a scalar."""
        data = self.mesh.data(param)
        if data is None or data.size() == 1:
            return None
        if param.dim() == 0:
            raise PlaitError(f"zero cannot divide the scalar {name!r}; give it the shape (1,)")
        ranks, part = data.size(), local(param)
        dim = shard_dim(param, ranks)
        mesh, placements, pieces = data, list[Placement](), 1
        if isinstance(param, DTensor):
            mesh, placements = self._join(data, param.device_mesh), list(param.placements)
            for size, placement in zip(param.device_mesh.shape, placements, strict=True):
                pieces *= size if getattr(placement, "dim", None) == dim else 1
        first = strided(dim, pieces) if pieces > 1 else Shard(dim)
        return Share(
            group=data.get_group(),
            ranks=ranks,
            rank=data.get_local_rank(),
            dim=dim,
            shape=part.shape,
            length=-(-part.shape[dim] // ranks),
            mesh=mesh,
            placements=(first, *placements),
            whole=param.shape,
            stride=param.stride(),
        )


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
