"""Counts the tensors that operations make."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """count: what operations returned inside. on_meta: tensors without values alone, such as parts of parameters, not
    lists of ranks."""

    def __init__(self, on_meta: bool = False) -> None:
        super().__init__()
        self.count, self._on_meta = 0, on_meta

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += sum(not self._on_meta or (isinstance(leaf, Tensor) and leaf.is_meta) for leaf in tree_leaves(out))
        return out
