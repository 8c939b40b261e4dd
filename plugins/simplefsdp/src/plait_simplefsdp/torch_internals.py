"""The only file of this package, beside inductor.py, that uses what torch keeps private.

Needs of `distributed_c10d` `_world` and `_resolve_process_group`; the operators `_c10d_functional`; `_StridedShard` and
`DeviceMesh._concatenate`; `torch._ops`; `aot_autograd`, `maybe_mark_dynamic` and the config of `torch._dynamo`; the
config and `min_cut_rematerialization_partition` of `torch._functorch`; `torch._logging.trace_structured`; the folder of
`torch._inductor`'s caches: all in torch 2.11 to 2.15. Tests:
plugins/simplefsdp/tests/test_graph.py, plugins/simplefsdp/tests/test_cached.py.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import OperatorBase, OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

__all__ = ["OpOverload", "OperatorBase", "aot_autograd", "collective_operators", "min_cut_rematerialization_partition"]

collective_operators = torch.ops._c10d_functional


def groups() -> list[tuple[str, list[int]]]:
    """(name, ranks) of every process group of this process."""
    from torch.distributed.distributed_c10d import _world

    return sorted((name, sorted(_world.pg_group_ranks[group])) for group, name in _world.pg_names.items())


def ranks_of(group: str) -> list[int]:
    """The world ranks of the process group of this name."""
    from torch.distributed.distributed_c10d import _resolve_process_group, get_process_group_ranks

    name: Any = group  # torch's stubs have a type of their own for it
    return get_process_group_ranks(_resolve_process_group(name))


def strided_shard(dim: int, parts: int) -> Placement:
    """The placement of a rank that has a share of each of `parts` equal parts of `dim`."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=parts)


def joined(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """A mesh of the dims of all `meshes`, which are slices of one root. Takes as long as there are ranks."""
    return DeviceMesh._concatenate(list(meshes))


def of_any_size(tensor: torch.Tensor) -> None:
    """Let graphs have one size for every length of dim 0 of `tensor`."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def values_as_sizes() -> AbstractContextManager[Any]:
    """Inside, a value that is read from a tensor becomes a size in the graph."""
    return torch._dynamo.config.patch(capture_scalar_outputs=True)


def partitioner_options(options: dict[str, Any]) -> AbstractContextManager[Any]:
    """Inside, the partitioner of forward and backward has these options."""
    return torch._functorch.config.patch(options)


def trace(name: str, payload: Callable[[], str]) -> None:
    """Add an artifact, JSON, to the folder TORCH_TRACE if it is set."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload)


def cache_folder() -> Path:
    """Where inductor keeps compiled graphs."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())
