"""Memory: settings of the allocator, the history of a GPU's memory.

Needs `torch._C._accelerator_setAllocatorSettings`, `_is_in_bad_fork` of `torch.cuda` and its like,
`torch.cuda.memory._record_memory_history` and `_dump_snapshot`, in torch 2.11 to 2.15. Tests:
tests/system/test_torch_internals.py.
"""

from pathlib import Path

import torch

from plait.system.accelerator import device_module, known_type


def set_allocator(settings: str) -> None:
    """Change the settings of the allocator, written as in PYTORCH_ALLOC_CONF, after it has read them."""
    torch._C._accelerator_setAllocatorSettings(settings)


def gpu_lost_by_fork() -> bool:
    """Whether this process is a fork of one that used a GPU, even if only to count them, so that it cannot use any."""
    kind = known_type()
    lost = getattr(device_module(kind), "_is_in_bad_fork", None) if kind else None
    return bool(lost and lost())


def record_history(entries: int) -> None:
    """Record the last `entries` allocations of GPU memory from now on."""
    torch.cuda.memory._record_memory_history(max_entries=entries)


def write_history(path: Path) -> None:
    """Write what was recorded for torch's memory viewer, and stop recording."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
