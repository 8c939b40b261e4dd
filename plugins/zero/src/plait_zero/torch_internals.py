"""The only file of this package that uses what torch keeps private.

Needs `DeviceMesh._concatenate`, `_StridedShard` and the queue of autograd's engine, in torch 2.11 to 2.15. Tests:
plugins/zero/tests/test_zero.py, plugins/zero/tests/test_conformance.py.
"""

from collections.abc import Callable

from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.placement_types import _StridedShard


def joined(*meshes: DeviceMesh) -> DeviceMesh:
    """One mesh with the dims of all, which have one root."""
    return DeviceMesh._concatenate([*meshes])


def strided(dim: int, pieces: int) -> Placement:
    """A shard along `dim` of what another placement of the same dim has divided into `pieces` before."""
    return _StridedShard(dim, split_factor=pieces)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Inside a backward: have `call` called when it ends."""
    Variable._execution_engine.queue_callback(call)
