"""Copies of the state in main memory, in buffers that are kept from one save to the next."""

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from plait.system.accelerator import is_accelerator


class Staging:
    """The first copy takes memory; later ones take none, as long as keys, shapes, dtypes and layouts stay."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._stream: torch.Stream | None = None

    def copy(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of each tensor, as `tensor.to("cpu", copy=True)` gives it, valid until the next call.

        Copies from a GPU go to page-locked memory on a stream of their own, with one wait for all of them.
        """
        before, self._kept = self._kept, {}
        pairs: list[tuple[Tensor, Tensor]] = []
        for key, tensor in state.items():
            room = before.pop(key, None)
            if room is not None and not _same_form(room, tensor):
                room = None
            if room is None and _on_gpu(tensor):
                room = torch.empty_like(tensor.detach(), device="cpu")
                lock(local_part(room))  # before the first copy, which it speeds up too
            if room is None:
                room = tensor.detach().to("cpu", copy=True)
            else:
                pairs.append((room, tensor))
            self._kept[key] = room
        self.fill(pairs)
        return dict(self._kept)

    def fill(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy the second of each pair into the first, which is in main memory. One wait for all that are on a GPU."""
        on_gpu: list[tuple[Tensor, Tensor]] = []
        for room, tensor in pairs:
            both = local_part(room), local_part(tensor)
            if _on_gpu(tensor):
                on_gpu.append(both)
            else:
                both[0].copy_(both[1])
        if on_gpu:
            device = on_gpu[0][1].device
            self._stream = self._stream or torch.Stream(device)
            self._stream.wait_stream(torch.accelerator.current_stream(device))
            with self._stream:
                for room, part in on_gpu:
                    room.copy_(part, non_blocking=True)
            self._stream.synchronize()


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _on_gpu(tensor: Tensor) -> bool:
    return is_accelerator(local_part(tensor).device)


def _same_form(room: Tensor, tensor: Tensor) -> bool:
    if isinstance(room, DTensor) and isinstance(tensor, DTensor):
        if (room.device_mesh, room.placements) != (tensor.device_mesh, tensor.placements):
            return False
    elif isinstance(room, DTensor) or isinstance(tensor, DTensor):
        return False
    mine, theirs = local_part(room), local_part(tensor)
    return (room.shape, mine.shape, mine.dtype) == (tensor.shape, theirs.shape, theirs.dtype)


def lock(room: Tensor) -> None:
    """Lock this new memory, whose values are lost, so that a GPU writes to it directly. Without it copies are slower.

    torch's own page-locked memory would be rounded up to a power of two. Only CUDA and ROCm lock memory that exists.
    """
    if not torch.cuda.is_initialized():
        return
    room.zero_()  # takes the memory with all threads; the lock would take it with one
    runtime, storage = torch.cuda.cudart(), room.untyped_storage()
    if storage.nbytes() and int(runtime.cudaHostRegister(storage.data_ptr(), storage.nbytes(), 1)) == 0:
        weakref.finalize(storage, runtime.cudaHostUnregister, storage.data_ptr()).atexit = False
