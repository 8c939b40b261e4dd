"""Correct set-ups of other projects, each in three dtypes: a false alarm? setups.py [NAME] [--write]

Two more have a wrong sum, which must be told from rounding in each dtype.

The files are those of benchmarks/correct, and those that docs/verify-recipes.md shows. Environments are made with pip
once, with a network. A cell says how many questions were answered "ok", and the seconds of the whole command; NAME
takes the set-ups whose target has it. --write puts the rows into docs/verified-bugs.md.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tables
from environments import TORCH, Verified, verified
from machine import about

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tests.docs.pages import ROOT, write_files  # noqa: E402

DTYPES = ("float64", "float32", "bfloat16")
COMMON = ("accelerate==1.15.0", "lightning-fabric==2.6.6")
TITAN, MEGATRON, DEEPSPEED = ("torchtitan==0.2.2", "triton"), ("megatron-core==0.16.1",), ("deepspeed==0.19.8",)
FP8 = ("torchao==0.18.0",)
SETUPS = {  # target -> (what it is, what pip installs)
    "plain.py::tensor": ("torch: `parallelize_module`", COMMON),
    "plain.py::sequence": ("torch: `parallelize_module`, norms over parts of the sequence", COMMON),
    "plain.py::fsdp2": ("torch: `fully_shard`", COMMON),
    "plain.py::hsdp": ("torch: `fully_shard`, replicated and sharded", COMMON),
    "plain.py::fsdp2_tp": ("torch: `fully_shard` x `parallelize_module`", COMMON),
    "plain.py::fsdp1": ("torch: FSDP1", COMMON),
    "plain.py::ddp": ("torch: DDP", COMMON),
    "plain.py::zero1": ("torch: DDP and `ZeroRedundancyOptimizer`", COMMON),
    "plain.py::pipeline": ("torch: `pipelining`, GPipe", COMMON),
    "hugging.py::llama": ("transformers 5.23: tensor parallelism, Llama", COMMON),
    "hugging.py::mixtral": ("transformers 5.23: tensor parallelism, Mixtral", COMMON),
    "hugging.py::trainer": ("transformers 5.23: Trainer under DDP", COMMON),
    "hugging.py::accelerate": ("Accelerate 1.15: DDP", COMMON),
    "recipes.py::accelerate": ("Accelerate 1.15: FSDP2", COMMON),
    "recipes.py::fabric": ("Lightning Fabric 2.6.6: DDP", COMMON),
    "titan.py::fsdp": ("torchtitan 0.2.2: FSDP2", TITAN),
    "titan_more.py::tp": ("torchtitan 0.2.2: TP", TITAN),
    "titan_more.py::hsdp": ("torchtitan 0.2.2: HSDP", TITAN),
    "titan.py::fsdp_tp": ("torchtitan 0.2.2: FSDP2 x TP", TITAN),
    "megatron_tp.py::tp": ("Megatron-core 0.16.1: TP", MEGATRON),
    "deepspeed_zero.py::zero1": ("DeepSpeed 0.19.8: ZeRO 1", DEEPSPEED),
    "deepspeed_zero.py::zero2": ("DeepSpeed 0.19.8: ZeRO 2", DEEPSPEED),
    "deepspeed_zero.py::zero3": ("DeepSpeed 0.19.8: ZeRO 3", DEEPSPEED),
    "fp8.py::fsdp2": ("torchao 0.18: fp8, emulated, under `fully_shard`", FP8),
}
PLANTED = {  # the same of set-ups with a wrong sum: all dtypes must tell it
    "plain.py::averaged_twice": ("torch: `fully_shard`, **a mean is taken twice**", COMMON),
    "fp8.py::averaged_twice": ("torchao 0.18: fp8, **a mean is taken twice**", FP8),
}


def cells(target: str, needs: tuple[str, ...], cwd: Path) -> Iterator[str]:
    """One for each dtype."""
    for dtype in DTYPES:
        if needs == FP8 and dtype == "float64":  # which rounds nothing
            yield "-"
            continue
        done = verified(needs, target, cwd, f"dtype={dtype}")
        yield f"{said(done)}, {done.seconds:.0f} s"
        if done.found is None or done.found["agrees"] == (target in PLANTED):
            print(f"{target} {dtype}:\n{done.printed}", file=sys.stderr, flush=True)


def said(done: Verified) -> str:
    if done.found is None:
        return "**not compared**"
    status = [answer["status"] for answer in done.found["answers"]]
    if (first := done.found["first"]) is not None:
        return f"**{status.count('wrong')} WRONG**: {first['cause']['sentence']}"
    return f"{status.count('ok')} ok" + (f", **{status.count('wrong')} WRONG**" if "wrong" in status else "")


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    head = f"| set-up | {' | '.join(DTYPES)} |"
    print(f"{about()}\n\n{head}\n|---|{'---|' * len(DTYPES)}", flush=True)
    names = [each for each in sys.argv[1:] if each != "--write"]
    chosen = {t: each for t, each in {**SETUPS, **PLANTED}.items() if not names or names[0] in t}
    rows, loads = [], []
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        for page in ("verify-any-code.md", "verify-recipes.md"):
            write_files(ROOT / "docs" / page, cwd)
        for file in (HERE / "correct").glob("*.py"):
            shutil.copy(file, cwd)
        for target, (words, needs) in chosen.items():
            loads.append(os.getloadavg()[0])
            rows.append(f"| {words} | {' | '.join(cells(target, needs, cwd))} |")
            print(rows[-1], flush=True)
            if "--write" in sys.argv:
                tables.write(tables.PAGE, head, 1, rows[-1:])
    if "--write" in sys.argv and not names:
        tables.write(tables.PAGE, head, 1, rows, tables.measured(TORCH.removeprefix("torch=="), loads))


if __name__ == "__main__":
    main()
