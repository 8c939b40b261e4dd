"""The only file of this package that uses what torch keeps private.

Needs `DTensor._local_tensor`, `UntypedStorage._cdata`, `Tensor._is_view`, `DeviceMesh._concatenate` and
`torch.utils._pytree`, in torch 2.11 to 2.13. Tests: plugins/fsdp2/tests/test_units.py,
plugins/fsdp2/tests/test_worlds.py.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only


def memory_of(tensor: Tensor) -> int:
    """Tells the memory of tensors apart that exist at the same time."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata


def with_views_copied(results: Any) -> Any:
    """`results`, a tree of them, with a copy in place of every view."""
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor._is_view() else tensor, results)


@contextmanager
def joined_once() -> Iterator[None]:
    """Inside, the same meshes are joined once."""
    concatenate = DeviceMesh._concatenate
    join = functools.cache(lambda *meshes: concatenate([*meshes]))
    with mock.patch.object(DeviceMesh, "_concatenate", staticmethod(lambda meshes: join(*meshes))):
        yield
