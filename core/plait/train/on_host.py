"""Values of tensors on the host, without a wait for what the device does after them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.system.accelerator import is_accelerator


class OnHost:
    """Copies of `tensors`, which `ready` completes on the current stream: a collective's wait, for example.

    On a GPU they are copied to pinned memory on a stream of their own, so reading them waits for this moment of the
    device's queue, not for the kernels of the next step. On a CPU nothing is copied.
    """

    def __init__(self, tensors: Sequence[Tensor], ready: Callable[[], Any]) -> None:
        self._tensors, self._ready, self._event = tensors, ready, None
        device = tensors[0].device
        if is_accelerator(device):
            stream = _stream(device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            with stream:
                ready()
                self._tensors = [_pinned(t) for t in tensors]
                self._event = stream.record_event()
            for tensor in tensors:
                tensor.record_stream(stream)

    def read(self) -> Sequence[Tensor]:
        """The tensors on the host, when their values are there."""
        if self._event is not None:
            self._event.synchronize()
        else:
            self._ready()
        return self._tensors


@functools.cache
def _stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def _pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
