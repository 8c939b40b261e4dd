"""The time of a step of Plait compared with a bare loop: python benchmarks/overhead.py [--cycles N] [overrides]

Two ranks run a whole `plait train 'strategy=[fsdp2]'` (metrics, curves, console, watchdog; no checkpoints, no
validation), and then one rank a whole `plait train 'strategy=[]'`. After each of its steps two bare loops, A and A',
take one step in the same processes: a slow minute slows all three. All ranks begin a step together, and it takes as
long as its slowest rank. Processor time, summed over ranks, excludes waiting; it is steadier if others use the machine
too.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import about, run_ranks

LAYOUTS = ((2, "strategy=[fsdp2]"), (1, "strategy=[]"))
LOOPS = ("plait", "A", "A'")
FIXED = ("checkpoint.enabled=false", "validation.interval=0", "launch.device=cpu")


def as_rank(overrides: list[str]) -> None:
    """One rank: `plait train` with the bare loops after each of its steps. Writes times-<rank>.json."""
    import torch.distributed as dist
    from bare_loop import BareLoop

    from plait.commands import main as cli
    from plait.contract.observer import RunObserver
    from plait.train import trainer

    class Interleaved(trainer.Trainer):
        def __init__(self, config: Any, *rest: Any) -> None:
            super().__init__(config, *rest)
            self.bare = {name: BareLoop(config.plain()) for name in LOOPS[1:]}
            self.spent: dict[str, list[list[float]]] = {name: [] for name in LOOPS}

        def begin(self) -> None:
            dist.barrier()
            self.began = time.perf_counter(), time.process_time()

        def end(self, name: str) -> None:
            now = time.perf_counter(), time.process_time()
            self.spent[name].append([after - before for after, before in zip(now, self.began, strict=True)])

        def fit(self) -> str:
            class Turns(RunObserver):
                def end(_, step: int) -> None:
                    self.end("plait")
                    for name in LOOPS[1:] if step % 2 else LOOPS[:0:-1]:
                        self.begin()
                        self.bare[name].step()
                        self.end(name)
                    self.begin()

            self.watch.all.append(Turns())
            self.begin()
            kind = super().fit()
            Path(f"times-{dist.get_rank()}.json").write_text(json.dumps(self.spent), encoding="utf-8")
            return kind

    trainer.Trainer = Interleaved  # what a rank trains with
    sys.argv = ["plait", "train", *overrides]
    cli.main()


def measure(
    ranks: int, overrides: list[str], cycles: int, warm_up: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Seconds and processor seconds of each step of each loop, without the warm-up."""
    overrides = [*FIXED, "run.name=overhead", f"train.steps={cycles + warm_up}", *overrides]
    with tempfile.TemporaryDirectory(prefix="plait-overhead-") as scratch:
        run_ranks(ranks, __file__, *overrides, cwd=scratch)
        found = [json.loads(Path(scratch, f"times-{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    # by rank, step, kind of time
    spent = {name: np.array([times[name] for times in found])[:, warm_up:] for name in LOOPS}
    return {n: s[..., 0].max(0) for n, s in spent.items()}, {n: s[..., 1].sum(0) for n, s in spent.items()}


def ratio(above: list[np.ndarray], below: list[np.ndarray], how: Callable[..., Any], draws: int = 2000) -> str:
    """The ratio of two medians (or means), and the interval that holds 95% of the ratios of resampled cycles."""

    def of(take: Any) -> Any:
        return how(np.hstack([a[take] for a in above]), -1) / how(np.hstack([b[take] for b in below]), -1)

    cycles = np.random.default_rng(0).integers(len(above[0]), size=(draws, len(above[0])))
    low, high = np.quantile(of(cycles), [0.025, 0.975])
    return f"{of(slice(None)):.4f}   ({low:.4f} to {high:.4f})"


def lower_quartile(seconds: np.ndarray, axis: int) -> Any:
    """The time below which a quarter of the steps lie: other work on the machine disturbed these least."""
    return np.quantile(seconds, 0.25, axis)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=150, help="steps of each loop that count")
    parser.add_argument("--warm-up", type=int, default=10, help="steps before that do not")
    parser.add_argument("overrides", nargs="*", help="of plait train, for all three loops")
    arguments = parser.parse_args()
    for ranks, strategy in LAYOUTS:
        kinds = measure(ranks, [strategy, *arguments.overrides], arguments.cycles, arguments.warm_up)
        said = " ".join([strategy, *arguments.overrides])
        print(f"\n{about()}\n{ranks} rank(s), {arguments.cycles} steps of each loop, {said}")
        report(*kinds)


def report(*kinds: dict[str, np.ndarray]) -> None:
    """Print the times of a step, of both kinds."""
    for kind, times in zip(("time of a step", "processor time of a step"), kinds, strict=True):
        print(f"\n{kind}")
        for name, seconds in times.items():
            low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75]) * 1000
            print(f"  {name:<6} median {middle:8.2f} ms   quartiles {low:8.2f} and {high:8.2f} ms")
        plait, a, b = ([times[name]] for name in LOOPS)
        print(f"  plait - bare  {(np.median(plait) - np.median(a + b)) * 1000:8.2f} ms")
        for label, how in (("medians", np.median), ("lower quartiles", lower_quartile), ("means", np.mean)):
            print(f"  {label:<15} plait / bare  {ratio(plait, a + b, how)}")
            print(f"  {'':<15} A / A'        {ratio(a, b, how)}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        as_rank(sys.argv[1:])
    else:
        main()
