"""The plan of a run on one device beside what it took: python benchmarks/gpu_memory.py [overrides]

The memory of torch's allocator, and the time of a step. Takes a few steps as `plait train` does, not compiled, as the
plan is. On a CPU, whose allocator counts nothing, the resident memory that the steps add is in its place.
"""

import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

WARM_UP, STEPS = 3, 5


def planned(overrides: list[str]) -> dict[str, Any]:
    """The plan on the cluster of this device: bytes and seconds."""
    command = [sys.executable, "-m", "plait", "plan", *overrides, "world=1", "--json", *cluster()]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode not in (0, 3):  # 3: it does not fit, according to the plan
        sys.exit(f"gpu_memory: Error: {(done.stderr or done.stdout).strip()}")
    return json.loads(done.stdout)


def cluster() -> list[str]:
    """`cluster=NAME` of this device, if Plait ships one for it."""
    from plait.contract.cluster import Cluster

    if not torch.cuda.is_available():
        return ["cluster=cpu"]
    found = Cluster.with_device("cuda", torch.cuda.get_device_name())
    return [f"cluster={name}" for name, one in Cluster.shipped().items() if found and one.name == found.name]


def taken(overrides: list[str]) -> tuple[int, int, float]:
    """(Peak of what was allocated, peak of what the allocator reserved, in bytes; seconds of a step, median), of the
    steps after the first ones."""
    from plait.compose.targets import build_source
    from plait.host import check, compose, make_optimizer
    from plait.parallel.apply import set_up
    from plait.parallel.process_group import device_of, start_group
    from plait.train.step_metrics import peak_memory

    checked = check(compose(overrides), 1)
    config = checked.config
    start_group(device_of(config.launch.device))
    before, _ = peak_memory(torch.device("cpu"))
    applied = set_up(checked.assembly)
    optimizer = applied.optimizer(lambda groups: make_optimizer(config.optimizer, groups, schedule=config.schedule))
    source, rows = build_source(config.data), config.train.local_batch_size
    source.prepare(lambda line: None)
    batches = source.open(seq_len=config.train.seq_len, seed=0, global_batch_size=rows, dp=(0, 1))
    laps, cuda = list[float](), applied.device.type == "cuda"
    for step in range(WARM_UP + STEPS):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        batch, start = batches.train(step), time.perf_counter()
        applied.step(batch, optimizer, rows=rows, max_norm=config.train.max_norm)
        if cuda:
            torch.cuda.synchronize()
        laps.append(time.perf_counter() - start)
    seconds = statistics.median(laps[WARM_UP:])
    torch.distributed.destroy_process_group()
    if cuda:
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), seconds
    grown = peak_memory(torch.device("cpu"))[0] - before
    return grown, grown, seconds


def main() -> None:
    overrides = sys.argv[1:]
    if {"-h", "--help"} & set(overrides):
        print(__doc__)
        return
    whole, (allocated, reserved, seconds) = planned(overrides), taken(overrides)
    plan, (low, high) = whole["memory"], whole["time"]["step"]
    kind = "torch.cuda" if torch.cuda.is_available() else "resident, NOT MEASURED ON A GPU"
    print(f"| GiB | plan | measured ({kind}) | plan / measured |\n|---|---|---|---|")
    for name, expected, found in (
        ("allocated", plan["peak"], allocated),
        *(
            (f"reserved, {kind_of} segments", size, reserved)
            for kind_of, size in zip(("expandable", "plain"), plan["reserved"], strict=True)
        ),
    ):
        print(f"| {name} | {expected / 2**30:.2f} | {found / 2**30:.2f} | {expected / found:.3f} |")
    print(f"\nA step, not compiled: planned {low:.3f} to {high:.3f} s, measured {seconds:.3f} s.")


if __name__ == "__main__":
    main()
