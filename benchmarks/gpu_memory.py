"""The plan of a run on one device beside what torch's allocator took: python benchmarks/gpu_memory.py [overrides]

Takes a few steps as `plait train` does, not compiled, as the plan is. On a CPU, whose allocator counts nothing, the
resident memory that the steps add is in its place.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PLAIT = str(Path(sys.executable).with_name("plait"))
STEPS = 3


def planned(overrides: list[str]) -> dict[str, Any]:
    """The part "memory" of the plan, on the cluster of this device, in bytes."""
    command = [PLAIT, "plan", *overrides, "world=1", "--json", *cluster()]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode not in (0, 3):  # 3: it does not fit, according to the plan
        sys.exit(f"gpu_memory: Error: {(done.stderr or done.stdout).strip()}")
    return json.loads(done.stdout)["memory"]


def cluster() -> list[str]:
    """`cluster=NAME` of this device, if Plait ships one for it."""
    from plait.contract.cluster import Cluster

    if not torch.cuda.is_available():
        return ["cluster=cpu"]
    found = Cluster.with_device("cuda", torch.cuda.get_device_name())
    return [f"cluster={name}" for name, one in Cluster.shipped().items() if found and one.name == found.name]


def taken(overrides: list[str]) -> tuple[int, int]:
    """(Peak of what was allocated, peak of what the allocator reserved) in a later step, in bytes."""
    from plait.compose.build import build_source
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
    for step in range(STEPS):
        if applied.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        applied.step(batches.train(step), optimizer, rows=rows, max_norm=config.train.max_norm)
    if applied.device.type == "cuda":
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    grown = peak_memory(torch.device("cpu"))[0] - before
    return grown, grown


def main() -> None:
    overrides = sys.argv[1:]
    if {"-h", "--help"} & set(overrides):
        print(__doc__)
        return
    plan, (allocated, reserved) = planned(overrides), taken(overrides)
    kind = "torch.cuda" if torch.cuda.is_available() else "resident, NOT MEASURED ON A GPU"
    print(f"| GiB | plan | measured ({kind}) | plan / measured |\n|---|---|---|---|")
    for name, expected, found in (
        ("allocated", plan["peak"], allocated),
        *(
            (f"reserved, {bound}", size, reserved)
            for bound, size in zip(("least", "most"), plan["reserved"], strict=True)
        ),
    ):
        print(f"| {name} | {expected / 2**30:.2f} | {found / 2**30:.2f} | {expected / found:.3f} |")


if __name__ == "__main__":
    main()
