"""The process group and the device of this rank."""

import datetime
import itertools
import os

import torch
import torch.distributed as dist

from plait.contract.errors import PlaitError
from plait.parallel.allocator import grow_segments
from plait.system.accelerator import accelerator_type, has_collectives

_GROUPS = itertools.count()  # those that this process starts, one after the other: one per job of a sweep


def device_type_here() -> str:
    """The type of this machine's accelerator if torch has collectives for it, otherwise "cpu"."""
    kind = accelerator_type()
    return kind if kind and has_collectives(kind) else "cpu"


def device_of(wanted: str) -> str:
    """The type of device for a value of `launch.device`. Raises PlaitError for an accelerator that is not here."""
    if wanted == "auto":
        return device_type_here()
    here = accelerator_type()
    if wanted not in ("cpu", here):
        fits = ("cpu", "auto", *([here] if here else []))
        sees = f"torch sees {here or 'no GPU'} here"
        raise PlaitError(f"launch.device={wanted}, but {sees}; use launch.device={' or '.join(fits)}").at(
            "launch.device", wanted, fits=fits
        )
    return wanted


def local_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, 0 if _sees_its_own_alone() else int(os.environ.get("LOCAL_RANK", "0")))


def _sees_its_own_alone() -> bool:
    """Whether Slurm shows each task only the GPU that it gave it, which then has the number 0 in every task."""
    return "SLURM_LOCALID" in os.environ and torch.accelerator.device_count() == 1


def _check_gpus(index: int) -> None:
    """Raises PlaitError, on every rank of a machine, if it has fewer GPUs than ranks."""
    ranks, count = int(os.environ.get("LOCAL_WORLD_SIZE", index + 1)), torch.accelerator.device_count()
    if not _sees_its_own_alone() and max(ranks, index + 1) > count:
        raise PlaitError(
            f"LOCAL_WORLD_SIZE={ranks} ranks run here, this one with LOCAL_RANK={index}, but torch sees {count} "
            f"GPU(s): each rank needs one of its own; start {count} or fewer"
        ).at("LOCAL_WORLD_SIZE", ranks, fits=f"at most {count}")


def start_group(
    device_type: str | None = None, timeout_seconds: float = 600.0, meeting_seconds: float | None = None
) -> None:
    """Start the default process group from the environment (torchrun), or of this process alone.

    gloo serves tensors on the CPU, torch's library for the device (nccl) those on a GPU. An existing group is kept. If
    all ranks run on one machine, this group and later ones listen on loopback alone, otherwise where the other machines
    reach this one.
    timeout_seconds: of collectives. meeting_seconds: how long the ranks wait for each other; None: as long.
    """
    from plait.system.sockets import listen_on_loopback, listen_to_other_machines, local_store, one_machine

    if one_machine():
        listen_on_loopback()
    if dist.is_initialized():
        return
    kind = device_type or device_type_here()
    if kind != "cpu":
        index = local_device(kind).index
        _check_gpus(index)
        grow_segments(local_device(kind))
        torch.accelerator.set_device_index(index)
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        meeting = datetime.timedelta(seconds=meeting_seconds or timeout_seconds)
        if (store := local_store(meeting)) is not None:
            store.set_timeout(timeout)
        else:
            store, rank, world = next(dist.rendezvous("env://", timeout=meeting))
            store.set_timeout(timeout)
            listen_to_other_machines(store, rank, world)
        store = dist.PrefixStore(f"group {next(_GROUPS)}", store)  # keys of an ended group would confuse the next
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore(), timeout=timeout)


def set_timeout(seconds: float) -> None:
    """Let collectives that begin from now on take so long, in every group that exists: torch gives those of meshes 30
    minutes, whatever the default group's is."""
    from plait.system.torch_internals import groups

    for group in groups.all_groups():
        groups.set_timeout(group, seconds)


def end_group() -> None:
    """Leave together: a rank that destroys its group while others still communicate can make them abort at exit."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
