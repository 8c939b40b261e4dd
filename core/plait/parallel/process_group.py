"""The process group and the device of this rank."""

import datetime
import os

import torch
import torch.distributed as dist

from plait.contract.errors import PlaitError
from plait.system.sockets import listen_on_loopback, local_store, one_machine


def device_type_here() -> str:
    """ "cuda" where torch sees a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_of(wanted: str) -> str:
    """ "cpu" or "cuda" for `launch.device` auto, cpu or cuda. Raises PlaitError for cuda where there is none."""
    if wanted == "cuda" and device_type_here() != "cuda":
        raise PlaitError("launch.device=cuda, but torch sees no GPU here; use launch.device=cpu or auto")
    return device_type_here() if wanted == "auto" else wanted


def local_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, int(os.environ.get("LOCAL_RANK", "0")))


def start_group(device_type: str | None = None, timeout_seconds: float = 600.0) -> None:
    """Start the default process group from the environment (torchrun), or of this process alone.

    gloo serves tensors on the CPU, nccl those on a GPU. A group that runs already stays. If all ranks run on one
    machine, this group and those made later listen on loopback alone.
    """
    if one_machine():
        listen_on_loopback()
    if dist.is_initialized():
        return
    kind = device_type or device_type_here()
    if kind != "cpu":
        index, count = local_device(kind).index, torch.accelerator.device_count()
        if index >= count:
            raise PlaitError(f"LOCAL_RANK={index}, but this machine has {count} GPU(s): each rank needs one of its own")
        torch.accelerator.set_device_index(index)
    backend = (
        "gloo"
        if kind == "cpu"
        else f"cpu:gloo,{kind}:{'nccl' if kind == 'cuda' else dist.get_default_backend_for_device(kind)}"
    )
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if (store := local_store(timeout)) is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore(), timeout=timeout)


def end_group() -> None:
    """Leave together: a rank that destroys its group while others still talk can make them abort at exit."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
