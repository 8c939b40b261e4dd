"""What a strategy may ask of the mesh; `plait.parallel.mesh` has the answers."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from plait.contract.axes import MeshLayout
from plait.contract.packed import Axis

if TYPE_CHECKING:  # `import plait` must not import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


class Mesh(Protocol):
    """All meshes of a run. world: 1-D, over all ranks. dense, views: one dim per axis that has several ranks. holders:
    1-D, over all ranks that hold parts or copies of this rank's parameters; None: this rank alone."""

    layout: MeshLayout
    device_type: str
    rank: int
    root: "DeviceMesh"
    world: "DeviceMesh"
    dense: "DeviceMesh | None"
    views: "Mapping[str, DeviceMesh | None]"
    holders: "DeviceMesh | None"

    def __getitem__(self, name: str) -> "DeviceMesh":
        """The 1-D mesh of axis `name`."""

    def __contains__(self, name: str) -> bool:
        """Whether the run has the axis `name`."""

    def rank_and_size(self, splits: str | None) -> tuple[int, int]:
        """(index, count) of this rank along what is split; None: among the ranks that see the same tokens."""

    def is_dp_leader(self) -> bool:
        """Whether this rank is the first of those that see the same tokens."""

    def sharding_axis(self, logical_axes: Iterable[Axis]) -> str | None:
        """The mesh axis that shards a parameter with these logical axes."""

    def view_of(self, param: "Tensor | None") -> str | None:
        """The view that `param` lives on; None: the dense one."""

    def data(self, param: "Tensor | None" = None, outer: str | None = None) -> "DeviceMesh | None":
        """The mesh of the ranks over which the gradient of `param` is summed; None: no axis sums gradients."""
