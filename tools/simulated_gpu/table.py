"""Fills the table of layouts in benchmarks/README.md: what a step asks of a simulated GPU, beside its plan.

    .venv/bin/python -m tools.simulated_gpu.table [--beside [--turns 7]] [--only NAMES] [--write]

The plan is made here, with this environment's torch; the step is counted by that of `make gpu-host`. One process of
Plait beside one of torchtitan says little of their seconds, so the two take turns.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from tools.simulated_gpu.counter import PYTHON, ROOT

PAGE = ROOT / "benchmarks/README.md"
HEAD = (
    "| run | kernels | by Triton | copies, MiB | collectives, MiB | waits: marked, other | peak, GiB | plan | error |\n"
)
BESIDE = "| run | kernels | copies, MiB | waits | peak, GiB | ratio | host, ms | ratio (95%) | host / device |\n"

HALF = ("precision.param=bfloat16",)
LLAMA = ("model=llama3_1b", "train.seq_len=4096", "train.local_batch_size=4", *HALF)
LARGE = ("model=llama3_8b", "train.seq_len=8192", "train.local_batch_size=1", *HALF)
QWEN = ("model=qwen3_0.6b", "train.seq_len=4096", "train.local_batch_size=4", *HALF)
MIXTURE = ("model=deepseek_v3_16b", "model.n_layers=6", "train.seq_len=4096", "train.local_batch_size=2", *HALF)
FULL, FSDP = ("remat.mode=full",), ("strategy=[fsdp2]",)


def divided(strategy: str, degree: int = 2) -> tuple[str, ...]:
    return f"strategy=[{strategy},fsdp2]", f"strategy.{strategy}.degree={degree}"


ROWS: dict[str, tuple[int, tuple[str, ...]]] = {
    "llama3_1b": (1, ("strategy=[]", *LLAMA)),
    "llama3_1b, fsdp2": (1, (*FSDP, *LLAMA)),
    "llama3_1b, fsdp2, float32": (1, (*FSDP, *LLAMA, "precision.param=float32", "train.local_batch_size=1")),
    "llama3_1b, fsdp2, loss.chunks=8": (1, (*FSDP, *LLAMA, "loss.chunks=8")),
    "llama3_1b, fsdp2, documents": (1, (*FSDP, *LLAMA, "data.attention=document")),
    "llama3_1b, fsdp2, saves at each step": (
        1,
        (*FSDP, *LLAMA, "checkpoint.enabled=true", "checkpoint.interval=1", "checkpoint.keep=1"),
    ),
    "llama3_1b, fsdp2, remat full": (1, (*FSDP, *LLAMA, *FULL)),
    "llama3_1b, fsdp2, remat selective": (1, (*FSDP, *LLAMA, "remat.mode=selective")),
    "llama3_1b, fsdp2, compiled": (1, (*FSDP, *LLAMA, "compile.enabled=true")),
    "llama3_1b, lora": (1, ("strategy=[lora,fsdp2]", *LLAMA)),
    "llama3_1b, fsdp2 on 8": (8, (*FSDP, *LLAMA)),
    "llama3_1b, HSDP 2 x 4": (8, (*FSDP, "strategy.fsdp2.replicate=2", *LLAMA)),
    "llama3_1b, tensor 2 x fsdp2 4": (8, (*divided("tensor_parallel"), *LLAMA)),
    "llama3_1b, context 2 x fsdp2 4": (8, (*divided("context_parallel"), *LLAMA)),
    "llama3_1b, simplefsdp on 8": (8, ("strategy=[simplefsdp]", *LLAMA)),
    "qwen3_0.6b, fsdp2": (1, (*FSDP, *QWEN)),
    "deepseek_v3_16b, 6 blocks, fsdp2": (1, (*FSDP, *MIXTURE)),
    "deepseek_v3_16b, 6 blocks, expert 8 x fsdp2": (8, (*divided("expert_parallel", 8), *MIXTURE)),
    "llama3_8b, fsdp2 on 8, remat full": (8, (*FSDP, *LARGE, *FULL)),
    "llama3_8b, tensor 2 x fsdp2 4": (8, (*divided("tensor_parallel"), *LARGE)),
    "llama3_8b, context 2 x fsdp2 4": (8, (*divided("context_parallel"), *LARGE)),
    "llama3_8b, pipeline 4 x fsdp2 2": (8, (*divided("pipeline", 4), *LARGE, "train.global_batch_size=16")),
    "llama3_8b, lora, 1 x 4096": (1, ("strategy=[lora,fsdp2]", *LARGE, "train.seq_len=4096")),
}
COMPILED = ("strategy=[]", "compile.enabled=true")
PEERS: dict[str, tuple[str, ...]] = {  # torchtitan has no balance loss
    "llama3_1b, compiled": (*LLAMA, *COMPILED),
    "qwen3_0.6b, compiled": (*QWEN, *COMPILED),
    "deepseek_v3_16b, 6 blocks, compiled": (*MIXTURE, *COMPILED, "model.balance_loss=0"),
    "llama3_8b, 8 blocks, remat full, compiled": (*LARGE, "model.n_layers=8", *FULL, *COMPILED),
    "llama3_1b": (*LLAMA, "strategy=[]"),
}


def counted(program: str, *arguments: str) -> dict[str, Any]:
    """What `tools.simulated_gpu.PROGRAM` counts in forty steps, of which the quickest tells the host's seconds."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counts.json"
        command = [
            str(PYTHON),
            "-m",
            f"tools.simulated_gpu.{program}",
            "--steps",
            "3",
            "42",
            f"--json={file}",
            *arguments,
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        return json.loads(file.read_text(encoding="utf-8"))


def planned(world: int, overrides: tuple[str, ...]) -> tuple[int, float]:
    """(bytes at the peak, the least seconds of a step), by `plait plan`."""
    from plait.host import compose
    from plait_plan.engine import plan

    found = plan(compose(["cluster=h100", "validation.interval=0", *overrides]), world)
    assert found.time is not None
    return found.memory.peak, found.time.step[0]


def row(name: str, told: dict[str, Any], plan: int) -> str:
    marked, others = (sum(told[kind].values()) for kind in ("marked waits", "waits"))
    gib = 2**30
    cells = [
        name,
        f"{told['kernels']:,.0f}",
        f"{told['triton']:,.0f}",
        f"{told['copies']:.0f}, {told['copied'] / 2**20:,.1f}",
        f"{told['collectives']:.0f}, {told['travelled'] / 2**20:,.0f}",
        f"{marked:.0f}, {others:.0f}",
        f"{told['peak'] / gib:.2f}",
        f"{plan / gib:.2f}",
        f"{plan / told['peak'] - 1:+.1%}".replace("-0.0%", "+0.0%"),
    ]
    return "| " + " | ".join(cells) + " |"


def in_turns(overrides: tuple[str, ...], turns: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What Plait and torchtitan count, each in a new process per turn. Every other turn torchtitan is the first."""
    told: dict[str, list[dict[str, Any]]] = {"count": [], "peer": []}
    for turn in range(turns):
        for program in list(told)[:: -1 if turn % 2 else 1]:
            told[program].append(counted(program, *overrides))
    return told["count"], told["peer"]


def ratio(above: Sequence[float], below: Sequence[float], draws: int = 10_000) -> tuple[float, float, float]:
    """(the ratio of the two medians, the ends of the interval that holds 95% of those of resampled turns)."""
    both = np.array([above, below])
    drawn = np.median(both[:, np.random.default_rng(0).integers(both.shape[1], size=(draws, both.shape[1]))], 2)
    found = np.median(both, 1)
    low, high = np.quantile(drawn[0] / drawn[1], [0.025, 0.975])
    return float(found[0] / found[1]), float(low), float(high)


def beside(name: str, mine: list[dict[str, Any]], theirs: list[dict[str, Any]], seconds: float) -> str:
    """Plait's figure, then torchtitan's. seconds: of a step on the device, by the plan."""

    def both(told: Callable[[dict[str, Any]], str]) -> str:
        return f"{told(mine[0])}; {told(theirs[0])}"

    hosts = [[told["host"] for told in turns] for turns in (mine, theirs)]
    middle, (found, low, high) = np.median(hosts, 1), ratio(*hosts)
    cells = [
        name,
        both(lambda told: f"{told['kernels']:,.0f}"),
        both(lambda told: f"{told['copies']:.0f}, {told['copied'] / 2**20:,.1f}"),
        both(lambda told: f"{sum(told['marked waits'].values()) + sum(told['waits'].values()):.0f}"),
        both(lambda told: f"{told['peak'] / 2**30:.2f}"),
        f"{mine[0]['peak'] / theirs[0]['peak']:.3f}",
        f"{middle[0] * 1e3:.1f}; {middle[1] * 1e3:.1f}",
        f"{found:.2f} ({low:.2f} to {high:.2f})",
        f"{middle[0] / seconds:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="rows, as patterns of their names")
    parser.add_argument("--write", action="store_true", help="put the rows into the table of the page")
    parser.add_argument("--beside", action="store_true", help="the runs of Plait and torchtitan instead")
    parser.add_argument("--turns", type=int, default=7, help="processes of each of the two")
    asked, failed = parser.parse_args(), 0
    head, rows = (BESIDE, list(PEERS)) if asked.beside else (HEAD, list(ROWS))
    print(head, end="")
    for name in rows:
        if not any(fnmatch(name, pattern) for pattern in asked.only):
            continue
        try:
            if asked.beside:
                mine, theirs = in_turns(PEERS[name], asked.turns)
                told, line = mine[0], beside(name, mine, theirs, planned(1, PEERS[name])[1])
            else:
                world, overrides = ROWS[name]
                told = counted("count", f"--world={world}", *overrides)
                line = row(name, told, planned(world, overrides)[0])
        except RuntimeError as error:
            failed += 1
            print(f"{name}: {error}", file=sys.stderr)
            continue
        print(line, flush=True)
        for wait, n in told["waits"].items():
            print(f"    {n:.0f} x {wait}", flush=True)
        if asked.write:
            write(head, rows, name, line)
    return failed


def write(head: str, order: list[str], name: str, line: str) -> None:
    """Put the row into the page's table under `head`, in place of the one before, in this order of names."""
    page = PAGE.read_text(encoding="utf-8")
    before, head, rest = page.partition(head)
    table, _, after = rest.partition("\n\n")
    rows = {match[1]: each for each in table.splitlines()[1:] if (match := re.match(r"\| (.+?) \|", each))}
    rows[name] = line
    sorted_rows = [rows[each] for each in order if each in rows]
    PAGE.write_text(before + head + "\n".join([table.splitlines()[0], *sorted_rows]) + "\n\n" + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
