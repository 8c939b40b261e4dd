"""The only file of this package that uses what torch keeps private.

Needs `torch.utils._python_dispatch.TorchDispatchMode`, `UntypedStorage._cdata` and `Tensor._version`, in torch 2.11 to
2.13. Tests: plugins/transformers/tests/test_weights.py, plugins/transformers/tests/test_other_sizes.py.
"""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "memory_of", "writes_to"]


def memory_of(tensor: Tensor) -> int:
    """Tells the memory of tensors apart that exist at the same time."""
    return tensor.untyped_storage()._cdata


def writes_to(tensor: Tensor) -> int:
    """How often something was written to `tensor`, also if that changed no value."""
    return tensor._version
