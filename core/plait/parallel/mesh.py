"""The axes of a run as torch DeviceMeshes: the dense view, further views of the same ranks, and who sums what."""

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from plait.contract import mesh as contract
from plait.contract.axes import MeshAxis, MeshLayout
from plait.contract.errors import PlaitError
from plait.contract.packed import Axis, Packed
from plait.system.torch_internals.meshes import factored, flattened, joined_meshes, rename

ALONE = "alone"  # the name of a dim over one rank


class Mesh(contract.Mesh):
    """All meshes of a run, created together: every rank must construct it at the same time.

    layout: the axes with their degrees.
    device_type: "cpu", or the type of torch's accelerator, such as "cuda".
    rank: of this process in the world.
    root: of all the others, so that torch joins data and model axes of one parameter into one DTensor mesh.
    world: 1-D over all ranks.
    dense: one dim per axis; None if no axis is left. Axes of one rank are left out if there are several ranks: torch
    would make a group for every rank of the world on each rank.
    views: name -> the same of a view.
    holders: 1-D, over all ranks that hold parts or copies of this rank's parameters, by number: those of its stage, and
    of its replica if replicas differ. None: this rank alone.
    joined: names of several axes -> the mesh of one flat dim that joins them; made for gradients that are summed over
    all of them.

    Meshes are kept: to make one, to compare it and to hash it takes torch as long as there are ranks.
    """

    def __init__(self, layout: MeshLayout, device_type: str) -> None:
        self.layout = layout
        self.device_type = device_type
        self.rank = dist.get_rank()
        all_axes = [axis for axes in (layout.dense, *layout.views.values()) for axis in axes]
        self._single = {a.name for a in all_axes if a.degree == 1 < layout.world_size}
        self.root = _root(device_type, layout.world_size, alone=bool(self._single))
        self.world = self.root["world"]
        self.dense = self._factor(layout.dense)
        self.views = {name: self._factor(axes) for name, axes in layout.views.items()}
        self._axes = {axis.name: self._axis(axis.name) for axis in all_axes}
        self.joined: dict[tuple[str, ...], DeviceMesh] = {}
        names = [a.name for a in layout.dense if a.degree > 1 and a.splits != "layers" and a.sums]
        whole = math.prod(a.degree for a in layout.dense if a.name in names) == layout.world_size
        self.holders = self.world if whole else self._join(names, "holders") if names else None
        self._data = functools.cache(self._find_data)
        for view in (None, *layout.views):  # groups must be created in the same order on all ranks, so now
            for outer in (None, *(a.name.rpartition(".")[2] for a in layout.data_axes(view))):
                self._data(view, outer)

    def __getitem__(self, name: str) -> DeviceMesh:
        """The 1-D mesh of axis `name`, of the dense view or (`view.axis` for what it left over) of another.

        Raises PlaitError if the run has no such axis; one of a single rank it has.
        """
        if name in self._axes:
            return self._axes[name]
        known = ", ".join(self._axes) or "none"
        raise PlaitError(f"there is no mesh axis {name!r}; available: {known}").at(name, fits=known)

    def __contains__(self, name: str) -> bool:
        """Whether the run has the axis `name`."""
        return name in self._axes

    def rank_and_size(self, splits: str | None) -> tuple[int, int]:
        """(index, count) of this rank along "batch", "sequence" or "layers": its part, and the number of parts.

        None: its index among the ranks that see the same tokens, and their number.
        """
        index = 0
        for axis, coordinate in zip(self.layout.dense, self._coordinates(), strict=True):
            if axis.splits == splits:
                index = index * axis.degree + coordinate
        return index, self.layout.count(splits)

    def is_dp_leader(self) -> bool:
        """Whether this rank counts for its tokens: it is the first of the ranks that see the same ones."""
        pairs = zip(self.layout.dense, self._coordinates(), strict=True)
        return all(coordinate == 0 for axis, coordinate in pairs if axis.splits not in ("batch", "sequence"))

    def sharding_axis(self, logical_axes: Iterable[Axis]) -> str | None:
        """The mesh axis that shards a parameter with these logical axes, None without one; a view's axis takes
        precedence over a dense one."""
        wanted = {a.axis if isinstance(a, Packed) else a for a in logical_axes} - {None}
        axes = [axis for own in (*self.layout.views.values(), self.layout.dense) for axis in own]
        return next((axis.name for axis in axes if wanted & {*axis.shards}), None)

    def view_of(self, param: Tensor | None) -> str | None:
        """The view that `param` lives on, from its own mesh; None: the dense one."""
        if isinstance(param, DTensor):
            names = set(param.device_mesh.mesh_dim_names or ())
            return next((v for v, axes in self.layout.views.items() if names & {a.name for a in axes}), None)
        return None

    def data(self, param: Tensor | None = None, outer: str | None = None) -> DeviceMesh | None:
        """The mesh of the ranks over which the gradient of `param` is summed. Until a strategy shards it, all of them
        hold the same values of it.

        The mesh has one flat dim. If the axis `outer` (by its dense name) has more than one rank and is not alone, the
        mesh has two dims: `outer`, then all other axes. Axes of one rank are left out, unless nothing else is left.
        None: no axis sums gradients. All of this is read off the mesh that the parameter lives on, so a strategy that
        sums gradients need not know which strategy sharded the parameter.
        """
        return self._data(self.view_of(param), outer)

    def axes_by_group(self, joined: bool = False) -> dict[str, str]:
        """Name of a process group -> the axis that it spans, for all axes of all views.

        joined: also groups that join several axes, as "data", and the one of all ranks, as "world".
        """
        names = [axis.name for axes in (self.layout.dense, *self.layout.views.values()) for axis in axes]
        # Reversed, so that of two axes that coincide the first is named.
        axes = {str(self[name].get_group().group_name): name for name in reversed(names)}
        if not joined:
            return axes
        several = {str(joint.get_group().group_name): "data" for joint in self.joined.values()}
        every = {str(dist.group.WORLD.group_name): "world"} if dist.group.WORLD else {}
        return {**every, **several, **axes}

    def _find_data(self, view: str | None, outer: str | None) -> DeviceMesh | None:
        prefix = f"{view}." if view else ""
        axes = self.layout.data_axes(view)
        apart = next((a for a in axes if a.name == f"{prefix}{outer}" and a.degree > 1), None)
        rest = [a for a in axes if a is not apart]
        names = [a.name for a in rest if a.degree > 1] or [a.name for a in rest[-1:]]
        if apart is None:
            return self._join(names, f"{prefix}data") if names else None
        if not names:
            return self[apart.name]
        return joined_meshes([self[apart.name], self._join(names, f"{prefix}data_beside_{outer}")])

    def _join(self, names: list[str], joined: str) -> DeviceMesh:
        """One flat dim over several axes; names are global to the root mesh, so they include the view's."""
        key = tuple(names)
        if len(names) == 1:
            return self[names[0]]
        if key not in self.joined:
            self.joined[key] = flattened(self._of(names[0])[key], joined)
        return self.joined[key]

    def _axis(self, name: str) -> DeviceMesh:
        if name not in self._single:
            return self._of(name)[name]
        mesh = self.root[ALONE]  # a new one each time
        rename(mesh, name)
        return mesh

    def _of(self, name: str) -> DeviceMesh:
        """The dense mesh or the view that has this axis."""
        return next(m for m in (self.dense, *self.views.values()) if m and name in (m.mesh_dim_names or ()))

    def _factor(self, axes: tuple[MeshAxis, ...]) -> DeviceMesh | None:
        axes = tuple(a for a in axes if a.name not in self._single)
        return factored(self.world, tuple(a.degree for a in axes), tuple(a.name for a in axes)) if axes else None

    def _coordinates(self) -> list[int]:
        rest, coordinates = self.rank, []
        for i in range(len(self.layout.dense)):
            inner = math.prod(a.degree for a in self.layout.dense[i + 1 :])
            coordinates.append(rest // inner)
            rest %= inner
        return coordinates


def _root(device_type: str, world_size: int, alone: bool) -> DeviceMesh:
    """A dim `world` over all ranks and, if `alone`, before it a dim over this rank alone."""
    world = init_device_mesh(device_type, (world_size,), mesh_dim_names=("world",))
    if not alone:
        return world
    ranks = torch.arange(world_size, dtype=torch.int, device="cpu").view(1, world_size)
    groups = [_group_of_this_rank(world_size), world.get_group()]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=(ALONE, "world"))


def _group_of_this_rank(world_size: int) -> Any:
    """For all axes of one rank together."""
    # torch splits the communicator of a group that is bound to devices, and all ranks have to take part in that
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        return dist.split_group(split_ranks=[[rank] for rank in range(world_size)], group_desc=f"mesh_{ALONE}")
    return dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc=f"mesh_{ALONE}")
