"""Seconds from the kill of a rank to its run's next step, and lost steps: python benchmarks/recovery.py [overrides]

Two ranks train a tiny model and save every `--interval` steps. After some step rank 1 gets SIGKILL. Counted are the
seconds until the line of the first step after all ranks have started again, and the steps that were done before and are
done once more. Turns:

- plait: `plait train`, from the checkpoint on disk. plait memory: with `checkpoint.memory_steps=1`.
- dcp: a loop of torch under torchrun, with `fully_shard` and torch.distributed.checkpoint; fabric and accelerate: loops
  of Lightning Fabric and of Accelerate under torchrun, in the environments of peers.py.

--machines 2: one rank on each of two machines, which are namespaces of this one (see tests/helpers/machines.py).
"""

import argparse
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from machine import about
from peers import environment

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.helpers.machines import Command, Machines  # noqa: E402

TINY = (
    *("model.dim=64", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=96"),
    *("train.seq_len=64", "train.local_batch_size=2", "train.steps=100000", "schedule.warmup_steps=4"),
    *("validation.interval=0", "metrics.log_every=1", "checkpoint.export=false", "launch.device=cpu"),
)
PEERS = ("dcp", "fabric", "accelerate")
NAMES = ("plait", "plait memory", *PEERS)
STEP = re.compile(r"^step:?\s+(\d+)\b")
RESUMED = re.compile(r"resumed after step (\d+)")


def command(name: str, machines: int, interval: int) -> list[str]:
    ranks = 2 // machines
    if name.startswith("plait"):
        plait = str(Path(sys.executable).with_name("plait"))
        where = [f"launch.nnodes={machines}", "launch.rdzv_endpoint=alpha:29500"] if machines > 1 else []
        memory = ["checkpoint.memory_steps=1"] if name == "plait memory" else []
        ours = ["strategy=[fsdp2]", f"launch.nproc_per_node={ranks}", "metrics.tensorboard=false", *where, *memory]
        return [plait, "train", *ours, f"checkpoint.interval={interval}"]
    python = sys.executable if name == "dcp" else str(environment(name))
    alone = ["--standalone"]
    several = [f"--nnodes={machines}", "--rdzv-backend=c10d", "--rdzv-endpoint=alpha:29500", "--rdzv-id=a"]
    torchrun = [python, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--max-restarts=3"]
    loop = [str(HERE / "recovery_loop.py"), name, f"checkpoint.interval={interval}"]
    return [*torchrun, *(several if machines > 1 else alone), *loop]


def rank_1(of: set[int]) -> int:
    """The process id of the rank that is killed, by its name or its environment, among those that the processes `of`
    began, directly or not."""
    for entry in Path("/proc").iterdir():
        try:
            if not (entry.name.isdecimal() and _descends(of, int(entry.name))):
                continue
            if (entry / "comm").read_text(encoding="utf-8") == "plait rank 1\n":
                return int(entry.name)
            own = (entry / "environ").read_bytes().split(b"\0")
            if b"RANK=1" in own and b"LOCAL_WORLD_SIZE" in b"".join(own) and b"PLAIT_SCRATCH" not in b"".join(own):
                return int(entry.name)
        except (OSError, ValueError):
            continue
    raise SystemExit("there is no rank 1")


def _descends(first: set[int], other: int) -> bool:
    """Whether process `other` is one of `first`, or was begun by one, directly or not."""
    while other not in {*first, 0}:
        status = Path(f"/proc/{other}/stat").read_text(encoding="utf-8")
        other = int(status.rpartition(")")[2].split()[1])  # the parent's; names may hold any sign
    return other in first


def wait(run: Command, seen: Callable[[list[tuple[float, str]]], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not seen(run.lines):
        if not run.running() or time.monotonic() > deadline:
            raise SystemExit(f"it did not come so far:\n{run.output}")
        time.sleep(0.002)


def steps(lines: Sequence[tuple[float, str]]) -> list[tuple[float, int]]:
    """(seconds, number) of each line of a step, of rank 0."""
    plain = ((at, re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", line)) for at, line in lines)
    return [(at, int(match[1])) for at, line in plain if (match := STEP.search(line))]


def recovered(name: str, machines: int, after: int, interval: int, overrides: Sequence[str]) -> tuple[float, int]:
    """(seconds from the kill to the end of the first new step, lost steps)."""
    full = [*command(name, machines, interval), *TINY, *overrides]
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="plait-recovery-") as scratch:
        if machines == 1:
            here = ["sh", "-c", 'cd "$0" && exec "$@"', scratch, *full]
            return _killed([Command(here, {**os.environ, **env})], after)
        with Machines(Path(scratch), "alpha", "beta") as both:
            return _killed([machine.start(*full, cwd=Path(scratch), **env) for machine in both], after)


def _killed(runs: list[Command], after: int) -> tuple[float, int]:
    first = runs[0]
    try:
        wait(first, lambda lines: any(number >= after for _, number in steps(lines)))
        victim, count = rank_1({run._process.pid for run in runs}), len(first.lines)
        killed = time.monotonic() - first._began
        os.kill(victim, signal.SIGKILL)

        def again(lines: list[tuple[float, str]]) -> int | None:
            """The place of the line that says where the ranks resumed."""
            return next((i for i, (_, line) in enumerate(lines) if i >= count and RESUMED.search(line)), None)

        wait(first, lambda lines: (at := again(lines)) is not None and bool(steps(lines[at:])))
        lines = [*first.lines]
        at = again(lines)
        assert at is not None
        resumed = RESUMED.search(lines[at][1])
        assert resumed is not None
        return steps(lines[at:])[0][0] - killed, max(number for _, number in steps(lines[:at])) - int(resumed[1])
    finally:
        for run in runs:
            if run.running():
                run._process.send_signal(signal.SIGTERM)
        for run in runs:
            run.code()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="of each that count")
    parser.add_argument("--machines", type=int, choices=(1, 2), default=1)
    parser.add_argument("--interval", type=int, default=20, help="steps between checkpoints on disk")
    parser.add_argument("--after", type=int, default=35, help="the step after which the rank is killed")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("overrides", nargs="*", help="of plait train, for all")
    asked, more = parser.parse_known_args()
    print(f"{about()}; machines: {asked.machines}\n", flush=True)
    results: dict[str, list[tuple[float, int]]] = {name: [] for name in asked.only}
    for turn in range(asked.turns):
        for name in random.Random(turn).sample(asked.only, len(asked.only)):
            try:
                seconds, lost = recovered(name, asked.machines, asked.after, asked.interval, [*asked.overrides, *more])
            except SystemExit as error:
                print(f"turn {turn}, {name}: {error}", flush=True)
                continue
            print(f"turn {turn}, {name}: {seconds:.2f} s, {lost} steps lost", flush=True)
            results[name].append((seconds, lost))
    print("\n| | recovered | seconds to the first new step, median | least, greatest | steps lost, median |")
    print("|---|--:|--:|--:|--:|")
    for name, values in results.items():
        if not values:
            print(f"| {name} | 0 of {asked.turns} | | | |")
            continue
        seconds, lost = zip(*values, strict=True)
        median, least, greatest = statistics.median(seconds), min(seconds), max(seconds)
        counts = f"{len(values)} of {asked.turns} | {median:.2f} | {least:.2f}, {greatest:.2f}"
        print(f"| {name} | {counts} | {statistics.median(lost):g} |")


if __name__ == "__main__":
    main()
