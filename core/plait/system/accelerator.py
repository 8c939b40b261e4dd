"""The devices that torch calls accelerators: GPUs of any maker, and those of other packages. A machine has one kind."""

from typing import Any

import torch
import torch.distributed as dist


def is_accelerator(device: torch.device) -> bool:
    """Whether tensors on `device` are computed beside the host, in a queue."""
    return device.type not in ("cpu", "meta")


def accelerator_type() -> str | None:
    """The type of this machine's accelerator, such as "cuda" (AMD's too), "xpu" or "mps"; None without one."""
    return known_type() if torch.accelerator.is_available() else None


def known_type() -> str | None:
    """The type of accelerator that this torch can use, whether or not one is here: asking disturbs no fork."""
    device = torch.accelerator.current_accelerator()
    return device.type if device else None


def has_collectives(device_type: str) -> bool:
    """Whether torch has a library of collectives for tensors on these devices; gloo takes those of main memory."""
    return dist.Backend.default_device_backend_map.get(device_type, "gloo") != "gloo"


def device_module(device_type: str) -> Any:
    """torch's module for these devices, such as `torch.cuda`. What it has differs from one to the next."""
    return torch.get_device_module(device_type)


def device_name(device_type: str) -> str:
    """The name of this machine's device, such as "NVIDIA H100 80GB HBM3"; "" for a CPU, and if there is none."""
    if device_type == "cpu" or accelerator_type() != device_type:
        return ""
    named = getattr(device_module(device_type), "get_device_name", None)
    return str(named()) if named else device_type


def total_memory() -> int:
    """Bytes of all accelerators of this machine, as far as torch tells."""
    kind = accelerator_type()
    told = getattr(device_module(kind), "get_device_properties", None) if kind else None
    if told is None:
        return 0
    return sum(int(getattr(told(i), "total_memory", 0)) for i in range(torch.accelerator.device_count()))


def in_use() -> bool:
    """Whether this process has begun to use an accelerator; it cannot be forked then."""
    kind = known_type()
    begun = getattr(device_module(kind), "is_initialized", None) if kind else None
    return bool(begun and begun())
