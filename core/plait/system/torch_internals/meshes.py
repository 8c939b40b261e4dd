"""Device meshes: those that join, divide or rename the dims of others.

Needs `DeviceMesh._concatenate`, `_flatten`, `_unflatten` and `_mesh_dim_names`, in torch 2.11 to 2.15. Test:
tests/parallel/test_mesh.py, for `joined_meshes` tests/system/test_torch_internals.py.
"""

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh


def joined_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """A mesh of the dims of all `meshes`, which are slices of one root."""
    return DeviceMesh._concatenate(list(meshes))


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A mesh of one dim, called `name`, over all ranks of `mesh`."""
    return mesh._flatten(name)


def factored(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh over the ranks of `mesh`, which has one dim, of dims of these sizes and names."""
    return mesh._unflatten(0, sizes, names)


def rename(mesh: DeviceMesh, *names: str) -> None:
    """Call the dims of `mesh` so, in place."""
    mesh._mesh_dim_names = names
