"""One rank of many on the simulated device: its group, and what stands in for numbers that no kernel has computed."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


@contextlib.contextmanager
def first_of(world: int) -> Iterator[None]:
    """A process group of `world` ranks in which this is number 0 and no other exists.

    NCCL's is torch's own, over the simulated library; nothing of the CPU's travels.
    """
    from plait.parallel.allocator import grow_segments
    from plait.system.torch_internals.groups import fake_store

    grow_segments(torch.device("cuda", 0))
    torch.accelerator.set_device_index(0)
    fake_store()  # makes torch know the backend; NCCL keeps the name of its group in a real store
    dist.init_process_group("cpu:fake,cuda:nccl", store=dist.HashStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Inside, what depends on computed numbers does as if they were right: they are zeros here."""
    with contextlib.ExitStack() as stack:
        planned = importlib.import_module("plait.contract.planned")
        # Before a plugin is imported: it takes the function out of the module.
        stack.enter_context(mock.patch.object(planned, "read_values", _read_values))
        plait: Any = importlib.import_module("plait")
        stack.enter_context(mock.patch.dict(plait.__dict__, read_values=_read_values))
        # Weights stay zeros, and take no memory of the host.
        stack.enter_context(mock.patch("plait.parallel.initialize.fill", return_value=0))
        stack.enter_context(mock.patch("plait.train.rehearsal.compare_shards", return_value=None))
        stack.enter_context(mock.patch("plait_context_parallel.fused.trouble", return_value=""))
        # torch 2.13's stages vote whether all of them know their shapes; no other is here to say that it does.
        vote = "torch.distributed.pipelining.PipelineStage._warmup_backward_result"
        with contextlib.suppress(AttributeError):
            stack.enter_context(mock.patch(vote, return_value=torch.ones(1)))
        yield


def _read_values(tensor: Any, planned: Callable[[], Any]) -> Any:
    tensor.tolist()  # which waits
    return planned()
