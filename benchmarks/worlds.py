"""How long set-up takes a rank of a small world and of large ones: python benchmarks/worlds.py [MODEL...]

Set-up: from the overrides to parameters on meta that strategies have divided; no values are drawn. The other ranks do
not exist. Each row is a process of its own, in which the worlds take turns; the first set-up, which imports, does not
count. Seconds are of the processor (one thread), the least of all turns: other work only adds to them.
"""

import argparse
import contextlib
import gc
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import about

MODELS = ("llama3_405b", "qwen3_30b_a3b", "deepseek_v3_671b")  # the largest of each family
SCRIPT = str(Path(__file__).resolve())


def sets(tensor: int, experts: int) -> dict[str, list[str]]:
    """The strategies of each row, as overrides."""
    degrees = [f"strategy.tensor_parallel.degree={tensor}", f"strategy.expert_parallel.degree={experts}"]
    return {
        "fsdp2": ["strategy=[fsdp2]"],
        f"fsdp2, TP {tensor}": ["strategy=[fsdp2,tensor_parallel]", degrees[0]],
        f"fsdp2, TP {tensor}, EP {experts}": ["strategy=[fsdp2,tensor_parallel,expert_parallel]", *degrees],
    }


def has_experts(model: str) -> bool:
    from plait.host import compose

    return bool(compose([f"model={model}"]).model.get("n_experts"))


def seconds(overrides: list[str], world: int) -> float:
    from plait.host import check, compose
    from plait.parallel.apply import set_up
    from plait.parallel.simulated import simulated

    gc.collect()
    with simulated(world, rank=world // 2):
        began = time.process_time()
        set_up(check(compose([*overrides, "launch.device=cpu", f"launch.nproc_per_node={world}"])).assembly, fill=False)
        return time.process_time() - began


def row(overrides: list[str], worlds: list[int], repeats: int) -> list[float]:
    import torch

    torch.set_num_threads(1)
    seconds(overrides, worlds[0])
    times = [[seconds(overrides, world) for world in worlds] for _ in range(repeats)]
    return [min(column) for column in zip(*times, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 4096, 16384], help="numbers of ranks")
    parser.add_argument("--tensor", type=int, default=8, help="degree of tensor parallelism")
    parser.add_argument("--experts", type=int, default=64, help="degree of expert parallelism")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each world")
    parser.add_argument("--row", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(*row(arguments.row, arguments.worlds, arguments.repeats))
        return
    print(f"{about()}\n")
    first, *others = arguments.worlds
    heads = [f"{world:,}" for world in arguments.worlds] + [f"{world:,} / {first:,}" for world in others]
    print(f"| model | strategies | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 2)}")
    for model in arguments.models:
        for name, overrides in sets(arguments.tensor, arguments.experts).items():
            if "EP" in name and not has_experts(model):
                continue
            options = ["--worlds", *map(str, arguments.worlds), "--repeats", str(arguments.repeats)]
            command = [sys.executable, SCRIPT, *options, "--row", f"model={model}", *overrides]
            with tempfile.TemporaryDirectory(prefix="plait-worlds-") as scratch, contextlib.chdir(scratch):
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8")
            base, *rest = found = [float(word) for word in done.stdout.split()]
            cells = [f"{each:.2f}" for each in found] + [f"{each / base:.2f}" for each in rest]
            print(f"| {model} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
