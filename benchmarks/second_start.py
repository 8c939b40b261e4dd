"""Seconds to the first step of compiled runs whose graphs an earlier start left in torch's caches:
python benchmarks/second_start.py [--cycles N] [overrides]

fsdp2, which compiles one block for all, and simplefsdp, which compiles the whole model, train one step of the debug
model on two ranks of this machine, in turns. The caches are those of a folder of this run, which the first start of
each fills; it does not count.
"""

import argparse
import os
import statistics
import tempfile

from first_step import PLAIT, ratio, run
from machine import about

COMPILED = [part for part in PLAIT if part != "strategy=[fsdp2]"] + ["compile.enabled=true"]
RUNS = {name: [*COMPILED, f"strategy=[{name}]"] for name in ("fsdp2", "simplefsdp")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=5, help="second starts of each")
    parser.add_argument("overrides", nargs="*", help="of plait train, for both")
    asked = parser.parse_args()
    print(f"{about()}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="plait-second-start-") as caches:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
        first = {name: run([*RUNS[name], *asked.overrides])[1] for name in RUNS}
        spent: dict[str, list[float]] = {name: [] for name in RUNS}
        for cycle in range(asked.cycles):
            for name in list(RUNS) if cycle % 2 else list(RUNS)[::-1]:
                spent[name].append(run([*RUNS[name], *asked.overrides])[1])
    print("| seconds to the first step | first start | later ones, median | relative to fsdp2 |\n|---|---|---|---|")
    for name, seconds in spent.items():
        relative = ratio(seconds, spent["fsdp2"])
        print(f"| {name} | {first[name]:.1f} | {statistics.median(seconds):.1f} | {relative} |")


if __name__ == "__main__":
    main()
