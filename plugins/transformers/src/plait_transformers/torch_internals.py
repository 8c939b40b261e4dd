"""The only file of this package that uses what torch keeps private.

Needs `torch.utils._python_dispatch.TorchDispatchMode` and `UntypedStorage._cdata`, in torch 2.11 to 2.13. Test:
plugins/transformers/tests/test_weights.py.
"""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "memory_of"]


def memory_of(tensor: Tensor) -> int:
    """Tells the memory of tensors apart that exist at the same time."""
    return tensor.untyped_storage()._cdata
