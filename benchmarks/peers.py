"""Training by Plait beside other libraries, in one process on a CPU: python benchmarks/peers.py [overrides]

A bare loop of torch, Lightning Fabric, Accelerate, the Trainer of transformers and torchtitan 0.2.2 train the debug
model on the same batches as `plait train`, in turns and in random order. Each library has an environment of its own in
`.peers`, over this one, whose torch and Plait it sees; pip fills it at the first run. The bare loop runs twice a cycle,
which shows how much equal runs differ. A cycle runs each twice:

1. one step, without a checkpoint: seconds from the command to the end of the step;
2. `--steps` steps and a checkpoint of weights and optimizer state: tokens per second between the first line and the
   last but one, seconds from the last step to the end of the command (the save, and leaving), peak memory of the
   largest process.
"""

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import attrs
from first_step import ratio
from machine import about

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / ".peers"
NEEDS = {  # what an environment has beside this one
    "fabric": ("lightning-fabric==2.6.6",),
    "accelerate": ("accelerate==1.15.0",),
    "trainer": ("accelerate==1.15.0",),  # the rest of transformers is here
    "torchtitan": ("torchtitan==0.2.2", "torchdata==0.11.0", "tyro==1.0.16"),
}
NAMES = ("bare", "bare again", "plait", *NEEDS)
STEP = re.compile(r"\bstep:?\s+(\d+)\b.*loss:?\s+([\d.]+)")
COLUMNS = {  # attribute of a result -> its title
    "start": "seconds to the end of the first step",
    "speed": "tokens per second",
    "end": "seconds from the last step to the end, with a save",
    "memory": "peak memory, MiB",
}


@attrs.frozen
class Lines:
    """When a step's line appeared, in seconds from the command, by step, and the loss that it told; when the command
    ended; MiB at its peak."""

    steps: dict[int, float]
    losses: dict[int, float]
    end: float
    memory: float


def environment(name: str) -> Path:
    """The Python of a peer's environment, which is made if it is not there; this Python, if it has what is needed."""
    if all(_is_here(*need.split("==")) for need in NEEDS[name]):
        return Path(sys.executable)
    at, mark = FOLDER / name, FOLDER / name / "made-of"
    wanted = "\n".join([sys.executable, *NEEDS[name]])
    if not mark.exists() or mark.read_text(encoding="utf-8") != wanted:
        print(f"environment: {at}", flush=True)
        venv.EnvBuilder(clear=True, symlinks=os.name != "nt").create(at)
        python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        here = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"  # with its editable packages
        (at / "lib" / python / "site-packages" / "here.pth").write_text(here, encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--python", str(at / "bin" / "python"), "--disable-pip-version-check", "-q"]
        pins = ["-c", str(HERE.parent / "constraints.txt")]
        subprocess.run([*pip, "install", *pins, *NEEDS[name]], check=True)
        mark.write_text(wanted, encoding="utf-8")
    return at / "bin" / "python"


def _is_here(distribution: str, wanted: str) -> bool:
    try:
        return version(distribution) == wanted
    except PackageNotFoundError:
        return False


def command(name: str) -> list[str]:
    """Without the overrides."""
    if name.startswith("plait"):
        plait = str(Path(sys.executable).with_name("plait"))
        compiled = ["compile.enabled=true"] if name.endswith("compiled") else []
        return [plait, "train", "strategy=[]", "launch.nproc_per_node=1", "checkpoint.mode=sync", *compiled]
    if name == "torchtitan":
        return [str(environment(name)), str(HERE / "torchtitan_run.py"), os.devnull]
    kind = name.split(" ")[0]
    return [str(environment(name)) if name in NEEDS else sys.executable, str(HERE / "peers_run.py"), kind]


def run(name: str, steps: int, save: bool, overrides: list[str], device: str = "cpu") -> Lines:
    settings = [
        *(f"launch.device={device}", f"train.steps={steps}", "metrics.log_every=1", "schedule.warmup_steps=0"),
        *("validation.interval=0", "checkpoint.export=false", "checkpoint.interval=0"),
        f"checkpoint.enabled={str(save).lower()}",
    ]
    with tempfile.TemporaryDirectory(prefix="plait-peers-") as scratch:
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        env = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count()), **hidden}
        seen, losses, lines = dict[int, float](), dict[int, float](), list[str]()
        began = time.perf_counter()
        process = subprocess.Popen(
            [*command(name), *settings, *overrides],
            cwd=scratch,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
        )
        assert process.stdout is not None
        for line in process.stdout:
            if found := STEP.search(re.sub(r"\x1b\[\d*m", "", line)):
                seen.setdefault(int(found[1]), time.perf_counter() - began)
                losses.setdefault(int(found[1]), float(found[2]))
            lines.append(line)
        _, status, used = os.wait4(process.pid, 0)
        end = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or sorted(seen) != list(range(1, steps + 1)):
        raise SystemExit(f"{name} ended with {process.returncode} after step {max(seen, default=0)}:\n{''.join(lines)}")
    return Lines(seen, losses, end, used.ru_maxrss / 1024)


def speed(lines: Lines, tokens: int) -> float:
    """Tokens per second between the first line and the last but one, at `tokens` per step."""
    last = max(lines.steps) - 1
    return tokens * (last - 1) / (lines.steps[last] - lines.steps[1])


def result(name: str, steps: int, tokens: int, overrides: list[str]) -> dict[str, float]:
    """A value for each of COLUMNS."""
    first, whole = run(name, 1, False, overrides), run(name, steps, True, overrides)
    return {
        "start": first.steps[1],
        "speed": speed(whole, tokens),
        "end": whole.end - whole.steps[steps],
        "memory": whole.memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=3, help="turns of each that count")
    parser.add_argument(
        "--warm-up", type=int, default=1, help="turns before that do not, which read files from the disk"
    )
    parser.add_argument("--steps", type=int, default=10, help="of the second run, at least 3")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="bare is always there")
    parser.add_argument("overrides", nargs="*", help="of plait train, for all")
    asked, more = parser.parse_known_args()
    overrides = [*asked.overrides, *more]
    if asked.steps < 3:
        parser.error("--steps must be at least 3")
    from plait.host import compose

    names = [name for name in NAMES if name in {*asked.only, "bare"}]
    train = compose(overrides).train
    tokens = train.local_batch_size * train.seq_len
    for name in names:
        command(name)  # makes its environment
    print(f"{about()}\n", flush=True)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for cycle in range(-asked.warm_up, asked.cycles):
        for name in random.Random(cycle).sample(names, len(names)):
            values = result(name, asked.steps, tokens, overrides)
            print(f"cycle {cycle}, {name}: " + ", ".join(f"{k} {v:.1f}" for k, v in values.items()), flush=True)
            if cycle >= 0:
                found[name].append(values)
    print()
    for key, title in COLUMNS.items():
        print(f"| {title} | median | relative to bare |\n|---|---|---|")
        columns = {name: [values[key] for values in each] for name, each in found.items()}
        for name in names:
            print(f"| {name} | {statistics.median(columns[name]):.2f} | {ratio(columns[name], columns['bare'])} |")
        print(flush=True)


if __name__ == "__main__":
    main()
