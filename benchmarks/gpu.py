"""All that is measured on a GPU: python benchmarks/gpu.py [--minutes N] [--only PART ...] [--list] [--dry-run]

The tests marked `gpu`; then Plait beside torchtitan 0.2.2 in runs that take turns; then Plait with other options. Each
part is a process of its own, and its result is in benchmarks/gpu/<date>-<device>.json when it ends. The limits of all
parts add up to more than the limit of the whole, which cuts (--minutes): the same command goes on after the last
finished part. A part that fails is recorded with its reason, and the next begins.
`make gpu` runs this in an environment that gpu_setup.py makes.
"""

import argparse
import datetime
import fnmatch
import importlib.util
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import torch
from gpu_process import calibrate, process, ring_attention, script, tests
from gpu_profile import described
from gpu_results import Record, Results
from machine import about
from throughput import GPU, ON_GPU, Case, measured, overrides_of
from throughput import run as train

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEER = HERE / "torchtitan_run.py"
ALONE = ("launch.nproc_per_node=1", "metrics.log_every=10")

CASES = (
    *GPU,
    Case("qwen3_0.6b", (*ON_GPU, "train.seq_len=4096", "train.local_batch_size=4"), 30, 10, 150),
    Case(  # cut to 6 of its 27 blocks; torchtitan has no balance loss
        "deepseek_v3_16b",
        (*ON_GPU, "train.seq_len=4096", "train.local_batch_size=2", "model.n_layers=6", "model.balance_loss=0"),
        30,
        10,
        200,
    ),
)
VARIANTS: dict[str, Callable[[Case], tuple[str, ...]]] = {  # of the first case
    "no strategy": lambda case: ("strategy=[]",),
    "simplefsdp": lambda case: ("strategy=[simplefsdp]",),
    "remat.mode=selective": lambda case: ("remat.mode=selective",),
    "loss.chunks=8": lambda case: ("loss.chunks=8",),
    "eager": lambda case: ("compile.enabled=false",),
    "float32, 1 sample": lambda case: ("precision.param=float32", "train.local_batch_size=1"),
    "saves": lambda case: (  # so far apart that the first is on disk before the second begins
        *("checkpoint.enabled=true", "checkpoint.export=false", "checkpoint.keep=1"),  # one takes 15 GB
        *(f"train.steps={case.steps * 4}", f"checkpoint.interval={case.steps * 8 // 5}"),
    ),
}
PLANNED: dict[str, tuple[str, ...]] = {  # of the first case, beside all cases as they are
    "loss.chunks=8": ("loss.chunks=8",),
    "remat.mode=selective": ("remat.mode=selective",),
    "float32, 1 sample": ("precision.param=float32", "train.local_batch_size=1"),
}
LONGER = {"simplefsdp": 240, "saves": 300}  # seconds: compiling takes longer, and 15 GB are written three times
SMALL = {"llama3_1b": "llama3_debug", "llama3_8b": "llama3_debug"} | {
    "qwen3_0.6b": "qwen3_debug",
    "deepseek_v3_16b": "deepseek_v3_debug",
}
DRY = ("train.seq_len=32", "train.local_batch_size=2", "compile.backend=aot_eager")


@attrs.frozen
class Part:
    """seconds: its limit. run: takes the limit in force and the file for its output."""

    name: str
    seconds: float
    run: Callable[[float, Path], Record]


def parts(dry: bool, rounds: int, memory: float = math.inf) -> Iterator[Part]:
    """In the order of their worth: a cut takes the last ones. memory: GiB of the GPU."""
    device = "cpu" if dry else "cuda"
    place = [*ALONE, f"launch.device={device}"]
    first = small(CASES[0]) if dry else CASES[0]
    yield Part("tests", 420, tests)
    yield Part("ring attention", 60, partial(ring_attention, device))
    for number in range(1, rounds + 1):
        for case in CASES:
            sides = [("plait", train), ("torchtitan", peer)]
            for side, how in sides if number % 2 else sides[::-1]:
                run = partial(training, how, small(case) if dry else case, place)
                if case.memory > memory:
                    run = partial(too_large, case, memory)
                yield Part(f"{case.model}/{side}/{number}", case.seconds, run)
        if number == 1:
            yield Part("profile", 200, partial(profile, first, place))
    for name, case, more in [(each.model, each, ()) for each in CASES] + [
        (f"{CASES[0].model}, {name}", CASES[0], more) for name, more in PLANNED.items()
    ]:
        plan = overrides_of(small(case) if dry else case, False, [*place, "validation.interval=0", *more])
        whole = partial(script, ["gpu_memory.py", *plan])
        fits = case.memory <= memory
        yield Part(f"plan and allocator: {name}", 150, whole if fits else partial(too_large, case, memory))
    for name, more in VARIANTS.items():
        run = partial(training, train, first, [*place, *more(first)])
        yield Part(f"{CASES[0].model}/{name}", LONGER.get(name, CASES[0].seconds), run)
    yield Part("calibrate", 180, partial(calibrate, device))
    cheap = ["--cycles=2", "--warm-up=1", "--batch=1", "--seq-len=32"] if dry else ["--cycles=10"]
    yield Part("experts", 180, partial(script, ["experts.py", *cheap]))
    few = ["--cycles=1", "--warm-up=0", *(["--steps=4", "--only", "plait"] if dry else ["--device=cuda"])]
    yield Part("fine-tuning", 420, partial(script, ["finetune.py", *few]))


def small(case: Case) -> Case:
    """The same for a CPU: other sizes, a few steps."""
    kept = [each for each in case.overrides if not each.startswith(("model.n_layers", "train."))]
    ties = ["model.tie_embeddings=true"] if case.model == "llama3_1b" else []
    return attrs.evolve(case, model=SMALL[case.model], overrides=(*kept, *DRY, *ties), steps=4, warm_up=1)


def training(how: Callable[..., Any], case: Case, more: list[str], seconds: float, log: Path) -> Record:
    """The figures of one training, by `how`: `train` or `peer`."""
    overrides = overrides_of(case, True, more)
    rows, why = how(overrides, seconds, log)
    found = measured(rows, case.warm_up)
    if why or found is None:
        return {"failed": why or "no step counted"}
    options = dict(each.split("=", 1) for each in overrides)
    batch = f"{options['train.local_batch_size']} x {options['train.seq_len']}"
    record = {**attrs.asdict(found), "batch": batch, "recomputed": options.get("remat.mode", "none")}
    if options["checkpoint.enabled"] == "true":
        first, *later = stand_still(rows, case.warm_up, int(options["checkpoint.interval"]))
        record["stand_still_seconds"] = {"first": first, "later": statistics.mean(later)}
    return {**record, "losses": [rows[0]["loss"], rows[-1]["loss"]], "overrides": overrides}


def too_large(case: Case, memory: float, seconds: float, log: Path) -> Record:
    return {"skipped": f"{case.model} takes {case.memory:g} GiB, and this GPU has {memory:.0f}"}


def profile(case: Case, more: list[str], seconds: float, log: Path) -> Record:
    """Where the time of a step goes."""
    traced, found = 3, list[str]()
    options = ["profile.enabled=true", f"profile.start={case.warm_up + 1}", f"profile.steps={traced}"]
    overrides = overrides_of(attrs.evolve(case, steps=case.warm_up + traced), True, [*more, *options])
    _, why = train(overrides, seconds, log, lambda folder: found.append(described(folder, traced)))
    return {"failed": why} if why else {"said": found[0], "overrides": overrides}


def stand_still(rows: list[dict[str, Any]], warm_up: int, every: int) -> list[float]:
    """Of each save but that of the last step: the seconds that the steps up to the next one take beyond the median."""
    laps = [rows[0]["tokens"] / row["tokens_per_second"] for row in rows]
    usual = statistics.median(laps[warm_up:])
    saves = range(every, len(rows), every)  # a save counts in the lap of the step after it
    return [sum(laps[start:end]) - usual * (end - start) for start, end in pairwise([*saves, len(rows)])]


def peer(overrides: list[str], seconds: float, log: Path) -> tuple[list[dict[str, Any]], str]:
    """The rows of the same training by torchtitan, and why it ended early."""
    if importlib.util.find_spec("torchtitan") is None:
        return [], "torchtitan is not installed"
    with tempfile.TemporaryDirectory(prefix="plait-peer-") as scratch:
        out = Path(scratch, "rows")
        why = process([str(PEER), str(out), *overrides], seconds, log)
        return [
            json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()
        ] if out.exists() and not why else [], why


def gpu() -> tuple[str, float]:
    """Its name, and its memory in GiB. Asked in a process of its own: this one must take no memory of the GPU."""
    code = "import torch; it = torch.cuda.get_device_properties(0); print(it.total_memory / 2**30, it.name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8")
    memory, name = done.stdout.strip().split(maxsplit=1)
    return name, float(memory)


def conditions(device: str, dry: bool) -> dict[str, Any]:
    versions = f"CUDA {torch.version.cuda}; one GPU; memory: the allocator's peak in the steps that count"
    kind = "NOT MEASURED ON A GPU; memory: a resident peak" if dry else versions
    return {"title": f"{device}, {datetime.date.today()}", "conditions": f"{about()}; {kind}", "device": device}


def commit() -> str | None:
    asked = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(
            asked, cwd=ROOT, capture_output=True, text=True, check=True, encoding="utf-8"
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # a copy without its history
        return None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25, help="no part runs longer than that in all")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PART", help="names of parts, or patterns of them")
    parser.add_argument("--patience", type=float, default=1, help="times each part's own limit, for a slow machine")
    parser.add_argument("--again", action="store_true", help="run parts anew that have a result")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side; the first side changes each time")
    parser.add_argument("--list", action="store_true", help="show the parts and run none")
    parser.add_argument("--dry-run", action="store_true", help="every part on the CPU, with small models")
    parser.add_argument("--results", type=Path, default=HERE / "gpu", help="the folder of results")
    parser.add_argument("--date", default=str(datetime.date.today()), help="of the results to go on with")
    return parser.parse_args()


def main() -> None:
    began, asked = time.monotonic(), arguments()
    if not asked.dry_run and not asked.list and not torch.cuda.is_available():
        sys.exit("gpu: torch sees no GPU here; --dry-run tries every part on the CPU")
    dry = asked.dry_run or not torch.cuda.is_available()
    device, memory = ("Dry run", math.inf) if dry else gpu()
    name = f"{asked.date}-{re.sub(r'[^a-z0-9]+', '-', device.lower())}"
    results = Results.at(asked.results / f"{name}.json", conditions(device, dry))
    logs = ROOT / ".gpu" / "logs" / name
    chosen = [
        part
        for part in parts(asked.dry_run, asked.rounds, memory)
        if any(fnmatch.fnmatchcase(part.name, pattern) for pattern in asked.only)
    ]
    if asked.list:
        for part in chosen:
            record = results.parts.get(part.name)
            state = "to do" if record is None else f"failed: {record['failed']}" if "failed" in record else "done"
            print(f"{part.name:<32} at most {part.seconds:3.0f} s   {state}")
        return
    print(f"{results.about['conditions']}\nresults: {results.path}; logs: {logs}", flush=True)
    for part in chosen:
        if part.name in results.parts and not asked.again:
            continue
        left = asked.minutes * 60 - (time.monotonic() - began)
        whole = part.seconds * asked.patience
        limit = min(whole, left)
        log = logs / f"{re.sub(r'[^a-z0-9.]+', '-', part.name)}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        record = part.run(limit, log) if left > 0 else {"failed": ""}
        spent = time.monotonic() - start
        if "failed" in record and (left <= 0 or (spent >= limit and limit < whole)):
            print(f"{part.name}: the {asked.minutes:g} minutes are over; the same command goes on here", flush=True)
            break
        when = datetime.datetime.now().isoformat(timespec="seconds")
        results.add(part.name, {**record, "seconds": round(spent, 1), "ended": when, "commit": commit()})
        print(f"{part.name}: {brief(record)}   ({spent:.0f} s)", flush=True)
        if "failed" in record and log.exists():
            print(
                "".join(
                    f"    {line}\n" for line in log.read_text(errors="replace", encoding="utf-8").splitlines()[-15:]
                ),
                flush=True,
            )
    else:
        print("all of these parts have a result")
    if results.parts:
        print(f"\n{results.path.with_suffix('.md').read_text(encoding='utf-8')}")


def brief(record: Record) -> str:
    """A record in one line."""
    if "failed" in record:
        return f"FAILED: {record['failed']}"
    if "skipped" in record:
        return f"left out: {record['skipped']}"
    if "tokens_per_second" not in record:
        return next(line for line in str(record["said"]).splitlines()[::-1] if line != "```")
    mfu = "" if record["mfu"] is None else f", MFU {record['mfu']:.1%}"
    return f"{record['tokens_per_second']:,.0f} tokens/s{mfu}, {record['peak_memory_bytes'] / 2**30:.1f} GiB"


if __name__ == "__main__":
    main()
