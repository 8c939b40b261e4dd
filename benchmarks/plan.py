"""The cost of a plan, and how far it is from the truth: python benchmarks/plan.py [cost] [ranks] [runs]

cost: time, processor time and memory of the process that plans Llama 3 8B on 512 and 405B on 16,384 H100s, and
DeepSeek-V3 671B on 2,048.
ranks: parameters, gradients, optimizer, peak and collectives beside those of 4 ranks over gloo, for each layout that
the tests compare.
runs: step times and memory beside published ones, as `published.py` prints them.
"""

import contextlib
import io
import json
import logging
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from machine import about

ROOT = Path(__file__).resolve().parents[1]
TP8 = ["strategy=[tensor_parallel,fsdp2]", "strategy.tensor_parallel.degree=8"]
EP64 = ["strategy=[expert_parallel,fsdp2]", "strategy.expert_parallel.degree=64"]
LARGE = [
    ("llama3_8b, TP 8 x FSDP 64", [*TP8, "model=llama3_8b", "train.seq_len=8192", "world=512"]),
    ("llama3_405b, TP 8 x FSDP 2,048", [*TP8, "model=llama3_405b", "train.seq_len=8192", "world=16384"]),
    ("deepseek_v3_671b, EP 64 x FSDP", [*EP64, "model=deepseek_v3_671b", "train.seq_len=4096", "world=2048"]),
]
RUN = [
    *("cluster=h100", "train.local_batch_size=1", "precision.param=bfloat16", "remat.mode=selective"),
    "validation.interval=0",
]


def cost() -> None:
    print("| plan | seconds | of a processor | GiB |\n|---|---|---|---|")
    for name, overrides in LARGE:
        done = subprocess.run(
            [sys.executable, __file__, "one", *RUN, *overrides],
            capture_output=True,
            text=True,
            check=True,
            encoding="utf-8",
        )
        took = json.loads(done.stdout)
        print(f"| {name} | {took['wall']:.1f} | {took['processor']:.1f} | {took['memory'] / 2**30:.2f} |", flush=True)


def one(arguments: list[str]) -> None:
    from plait.commands.main import run

    start = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        run("plan", arguments)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    took = {"wall": time.monotonic() - start, "processor": usage.ru_utime + usage.ru_stime}
    print(json.dumps({**took, "memory": usage.ru_maxrss * 1024}))


def runs() -> None:
    import published

    published.main([], few=True)


def ranks() -> None:
    sys.path.insert(0, str(ROOT))  # for the helpers of the tests

    from plait.host import check, compose
    from plait_plan.engine import plan
    from plait_testing.pool import Pool
    from plugins.plan.tests.test_measured import LAYOUTS, RUN
    from tests.helpers import measured

    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    print("Plan / measured; collectives: those of a step, and the bytes that they move.\n")
    print("| layout | parameters | gradients | optimizer | peak | collectives | bytes |\n|---|---|---|---|---|---|---|")
    pool = Pool(4)
    for name, overrides in LAYOUTS.items():
        checked = check(compose([*RUN, *overrides]), 4)
        found = plan(checked.config, 4)
        real, alone = (pool.run(measured.measure, checked.config, counts, world=4)[0] for counts in (True, False))
        seen = Counter((axis, kind) for kind, axis, _ in real.collectives)
        same = {(c.axis, c.kind): c.count for c in found.collectives} == seen
        sizes = [getattr(found.memory, kind) / getattr(real, kind) for kind in ("parameters", "gradients", "optimizer")]
        sent = sum(c.bytes for c in found.collectives) / sum(size for *_, size in real.collectives)
        shares = " | ".join(f"{share:.4f}" for share in (*sizes, found.memory.peak / alone.peak))
        print(f"| {name} | {shares} | {'the same' if same else 'OTHERS'} | {sent:.4f} |", flush=True)
    pool.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        one(sys.argv[2:])
    elif {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    else:
        print(f"{about()}\n")
        for part in (cost, ranks, runs):
            if part.__name__ in sys.argv[1:] or len(sys.argv) == 1:
                part()
                print()
