"""Measures this machine's devices and links: copies, matrix products, and collectives over its ranks."""

import functools
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from plait.host import cores, device_name

DTYPES = ("bfloat16", "float16", "float32", "float64")
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed them
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
LEAST, MOST = 5, 200  # calls of each measurement
WINDOW = 0.2  # seconds that its calls take together, if that needs no more than MOST
SLOW = 1.0  # seconds; of what takes longer, the first call counts: float16 on a CPU takes 10 s per product


@attrs.frozen
class Sizes:
    """copy: bytes. product: rows and columns of square matrices, ascending. sent: bytes of collectives, ascending."""

    copy: int
    product: tuple[int, ...]
    sent: tuple[int, ...]


OF_A_CPU = Sizes(2**26, (256, 512, 1024), tuple(2**n for n in range(10, 25, 2)))
OF_A_GPU = Sizes(2**30, (2048, 4096, 8192), tuple(2**n for n in range(12, 29, 2)))


@attrs.frozen
class Measured:
    """What one rank measured while all did the same. Rates are per second, of the fastest and the slowest size.

    name: of the device. memory: its bytes; held: bytes in use before there is a model.
    bandwidth: bytes of copies. products: dtype -> operations. launch: seconds of a tiny operator.
    sends: (kind, bytes, seconds) of every collective.
    """

    name: str
    memory: float
    held: float
    bandwidth: tuple[float, float]
    products: dict[str, tuple[float, float]]
    launch: float
    sends: list[tuple[str, int, float]]


def measure(rank: int, ranks: int, device_type: str, folder: str, sizes: Sizes) -> None:
    """Measure, on every rank together. Rank 0 saves its `Measured` as `folder`/measured."""
    backend = "gloo"
    if device_type != "cpu":
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
    torch.set_num_threads(max(1, cores() // ranks) if device_type == "cpu" else 1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        dist.barrier()
        found = Measured(
            device_name(device_type) or "CPU",
            *_memory(device_type, ranks),
            _copies(device_type, sizes.copy),
            {name: rates for name in DTYPES if (rates := _products(device_type, name, sizes.product))},
            _launch(device_type),
            [(kind, size, _send(device_type, kind, size)) for kind in SENDS for size in sizes.sent]
            if ranks > 1
            else [],
        )
        if rank == 0:
            torch.save(attrs.asdict(found), Path(folder) / "measured")
    finally:
        dist.destroy_process_group()


def links(sends: list[tuple[str, int, float]], ranks: int) -> tuple[float, float, float]:
    """(bandwidth, latency, share of the bandwidth that the slowest kind reaches) of a ring, as `roofline` models it.

    The latency is that of one hop, from the smallest size; the bandwidth that of the fastest kind, at the largest.
    """
    hops, share = math.ceil(math.log2(ranks)), (ranks - 1) / ranks
    smallest, largest = min(size for _, size, _ in sends), max(size for _, size, _ in sends)
    rounds = {kind: 2 if kind == "all_reduce" else 1 for kind, _, _ in sends}
    latency = statistics.median(took / rounds[kind] / hops for kind, size, took in sends if size == smallest)
    rates = {}
    for kind, size, took in sends:
        if size == largest:
            rates[kind] = size * share / max(took / rounds[kind] - latency * hops, took / rounds[kind] / 10)
    return max(rates.values()), latency, min(rates.values()) / max(rates.values())


def _copies(device_type: str, size: int) -> tuple[float, float]:
    rates = []
    for n in (size // 4, size):
        source, target = (torch.ones(n // 4, device=device_type) for _ in range(2))
        rates.append(2 * n / _seconds(device_type, functools.partial(target.copy_, source)))
        rates.append(2 * n / _seconds(device_type, functools.partial(torch.mul, source, 2.0, out=target)))
        rates.append(2 * n / _seconds(device_type, functools.partial(torch.exp, source, out=target)))
    return max(rates), min(rates)


def _products(device_type: str, name: str, sizes: tuple[int, ...]) -> tuple[float, float] | None:
    rates = []
    try:
        for n in sizes:
            a = torch.ones(n, n, device=device_type, dtype=getattr(torch, name))
            rates.append(2 * n**3 / _seconds(device_type, functools.partial(torch.matmul, a, a)))
    except RuntimeError:  # a device without this dtype
        return None
    return max(rates), min(rates)


def _launch(device_type: str) -> float:
    x, many = torch.ones(16, device=device_type), 200

    def operators() -> None:
        for _ in range(many):
            x.add_(1.0)

    return _seconds(device_type, operators) / many


def _memory(device_type: str, ranks: int) -> tuple[float, float]:
    told = None if device_type == "cpu" else getattr(torch.get_device_module(device_type), "mem_get_info", None)
    if told is not None:
        free, total = told()
        return float(total), float(total - free - torch.accelerator.memory_reserved())
    page = os.sysconf("SC_PAGE_SIZE")
    resident = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * page
    return os.sysconf("SC_PHYS_PAGES") * page / ranks, float(resident)


def _all_reduce(x: Tensor) -> None:
    dist.all_reduce(x)


def _all_gather(x: Tensor) -> None:
    _gather(x, x.chunk(dist.get_world_size())[dist.get_rank()].clone())


def _reduce_scatter(x: Tensor) -> None:
    _scatter(torch.empty_like(x.chunk(dist.get_world_size())[0]), x)


def _all_to_all(x: Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(x), x)


SENDS: dict[str, Callable[[Tensor], None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _send(device_type: str, kind: str, size: int) -> float:
    ranks = dist.get_world_size()
    x = torch.ones(-(-size // 4 // ranks) * ranks, device=device_type)
    return _seconds(device_type, lambda: SENDS[kind](x))


def _seconds(device_type: str, work: Callable[[], Any]) -> float:
    """The mean time of several calls after a first one, each of which begins when all ranks are ready.

    A step is a sum of many calls, so the mean counts: where ranks or other programs share the cores, a short call is
    mostly undisturbed, and a median knows nothing of those that wait for a core.
    """
    first = _call(device_type, work)
    slowest = _slowest(first)
    if slowest > SLOW:
        return first
    times = min(max(math.ceil(WINDOW / max(slowest, 1e-9)), LEAST), MOST)
    return max(statistics.fmean(_call(device_type, work) for _ in range(times)), 1e-9)


def _call(device_type: str, work: Callable[[], Any]) -> float:
    dist.barrier()
    _wait(device_type)
    start = time.perf_counter()
    work()
    _wait(device_type)
    return time.perf_counter() - start


def _slowest(seconds: float) -> float:
    """Of all ranks, which must make the same calls."""
    found = torch.tensor(seconds)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _wait(device_type: str) -> None:
    if device_type != "cpu":
        torch.accelerator.synchronize()
