"""The only file of this package that uses what torch keeps private.

Needs `DTensor._local_tensor`, `UntypedStorage._cdata`, `Tensor._is_view`, `DeviceMesh._concatenate` and
`torch.utils._pytree`; of FSDP2 its states, groups and `FSDPParam`, with the extension of its all-gather, and
`_unsafe_preserve_version_counter`: all in torch 2.11 to 2.15. Tests: plugins/fsdp2/tests/test_units.py,
plugins/fsdp2/tests/test_worlds.py, tests/parallel/test_wire.py.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
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


def sharded_params(module: nn.Module) -> Iterator[FSDPParam]:
    """What FSDP2 knows of each parameter that it shards as one of the units of `module` itself."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        yield from group.fsdp_params if group else ()


def place_of(param: FSDPParam) -> tuple[nn.Module, str]:
    """The module that has it, and its name there."""
    return param._module_info.module, param._module_info.param_name


def extend(param: Any, extension: Any) -> None:
    """Let FSDP2 ask `extension`, in the place of the local tensor, what it sends of `param` and makes of it.

    It asks for `fsdp_pre_all_gather`, `fsdp_post_all_gather`, `size` and `to`, as of a tensor of a class of its own.
    """
    param.__class__, param.extension = Extended, extension
    param._init_extensions()


class Extended(FSDPParam):
    @property
    def _sharded_local_tensor(self) -> Any:
        return self.extension  # type: ignore[attr-defined] # `extend` sets it


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Write to `tensor`, which backward may have kept, what stood there before."""
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor.copy_(values)
