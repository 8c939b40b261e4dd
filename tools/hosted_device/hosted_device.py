"""torch's module for the device "hosted". torch imports this when it is imported, and calls `begin`.

Copied beside the compiled half by `build.py`; it is not part of any package of Plait.
"""

import sys
from typing import Any

import torch

KIND = "hosted"

Event = torch.Event


def begin() -> None:
    import _hosted_device as compiled
    import torch.distributed as dist

    torch.utils.rename_privateuse1_backend(KIND)
    compiled.begin()
    torch._register_device_module(KIND, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def made(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return compiled.Collectives(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("hosted_gloo", made, devices=[KIND])


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return False


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    import _hosted_device as compiled

    return int(compiled.devices())


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(device)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize()


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream()


def Stream(device: Any = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(device=f"{KIND}:{current_device()}", priority=priority)


def stream(chosen: torch.Stream) -> torch.Stream:
    return chosen


def get_device_name(device: Any = None) -> str:
    return "a device in the memory of the host"


def manual_seed_all(seed: int) -> None:
    """The CPU's generator is the device's, too, and has been seeded."""


manual_seed = manual_seed_all


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16]
