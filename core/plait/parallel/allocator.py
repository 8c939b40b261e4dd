"""Settings of torch's allocator of GPU memory, which must stand before a GPU is first used."""

import ctypes
import os

import torch

NAME = "PYTORCH_ALLOC_CONF"
GROWING = "expandable_segments:{}"


def grow_segments(device: torch.device) -> None:
    """Let torch's allocator grow its segments, which wastes less memory than segments of fixed sizes.

    Not if the user configures the allocator, nor where torch cannot do it: from 2.13 it asks NVML about each GPU,
    crashes without that library, and raises an error on some machines that have it. Uses a few bytes of `device`.
    """
    if any(f"PYTORCH_{kind}ALLOC_CONF" in os.environ for kind in ("", "CUDA_", "HIP_")):
        return
    if device.type == "cuda" and torch.version.hip is None and not nvml_loads():
        return
    os.environ[NAME] = GROWING.format(True)  # torch reads it once
    try:
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        from plait.system.torch_internals.memory import set_allocator

        os.environ[NAME] = GROWING.format(False)  # also for processes that this one starts
        set_allocator(os.environ[NAME])
        torch.empty(1, device=device)  # raises if something else was wrong


def nvml_loads() -> bool:
    """Whether NVIDIA's management library is here, by the name that torch uses. Some containers have a GPU without."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True
