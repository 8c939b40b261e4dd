"""Has a model that casts to float32 by hand compute in float64, so that a comparison sees errors and no rounding."""

from typing import Any

import torch

from plait_testing.torch_internals import TorchDispatchMode


class Widened(TorchDispatchMode):
    """Inside, backward and recomputation too, what asks for float32 gets float64: a cast, a sum, a new tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
