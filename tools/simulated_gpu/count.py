"""Counts what steps of `plait train` ask of a simulated GPU, as the first of any number of ranks.

    .gpu-host/bin/python -m tools.simulated_gpu.count [--world 8] [--steps 3 4] [--json FILE] OVERRIDES...

Counts, not times: memory, copies and launches are those of a GPU, kernels compute nothing. `make gpu-host` makes the
environment.
"""

import argparse
import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import attrs

from tools.simulated_gpu.counter import LAUNCHES, Counter, Counts, run_on_the_device

# Files that read the row of the step before, whose event has long passed.
MARKED = ("plait/train/on_host.py", "plait/train/step_metrics.py")


@attrs.frozen
class Counted:
    """steps: how many. peak, reserved: bytes, the most that torch's allocator gave out and held in one of them. host:
    seconds of this machine's processor, all threads, in the quickest of them."""

    counts: Counts
    steps: int
    peak: int
    reserved: int
    host: float

    def waits(self, marked: bool) -> dict[str, int]:
        """ "what | where" -> how many in all steps, of the marked or of the other waits."""
        return {
            f"{wait.what} | {' < '.join(wait.where)}": n
            for wait, n in self.counts.waits.items()
            if marked == wait.where[0].startswith(MARKED)
        }

    def as_json(self) -> dict[str, Any]:
        """What `table.py` reads; all but peaks per step."""
        per = self.steps
        copies: dict[str, list[float]] = {}
        for (kind, name), (calls, size) in sorted(self.counts.kinds.items()):
            if kind in ("copy", "collective"):
                copies[name] = [calls / per, size / per]
        return {
            "kernels": self.counts.calls(*LAUNCHES) / per,
            "triton": self.counts.calls("triton") / per,
            "copies": self.counts.calls("copy") / per,
            "copied": self.counts.bytes("copy") / per,
            "collectives": self.counts.calls("collective") / per,
            "travelled": self.counts.bytes("collective") / per,
            "by name": copies,
            "launches": {
                name: calls / per for (kind, name), (calls, _) in self.counts.kinds.items() if kind in LAUNCHES
            },
            "marked waits": {name: n / per for name, n in self.waits(marked=True).items()},
            "waits": {name: n / per for name, n in self.waits(marked=False).items()},
            "peak": self.peak,
            "reserved": self.reserved,
            "host": self.host,
        }


@attrs.define
class Window:
    """Counts from the beginning of step `first` to the beginning of the one after `last`.

    That includes everything between two steps, such as the row of the step before and a save.
    """

    first: int
    last: int
    counter: Counter
    counted: Counted | None = None
    _peaks: list[tuple[int, int]] = attrs.field(factory=list)
    _times: list[float] = attrs.field(factory=list)

    def begins(self, number: int) -> None:
        """Call it when step `number` begins."""
        import torch

        self._times.append(time.process_time())
        if number == self.first:
            torch.cuda.reset_peak_memory_stats()
            self._peaks, self._times = [], self._times[-1:]
            self.counter.start()
        elif number == self.last + 1:
            counts = self.counter.stop()
            self.look()
            (peak, reserved), steps = map(max, zip(*self._peaks, strict=True)), self.last + 1 - self.first
            quickest = min(after - before for before, after in pairwise(self._times))
            self.counted = Counted(counts, steps, peak, reserved, quickest)

    def look(self) -> None:
        """Call it before the allocator's peaks are reset."""
        import torch

        self._peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))


def count(overrides: Sequence[str], world: int, first: int, last: int) -> Counted:
    """What steps `first` to `last` of `plait train` ask for; one more is trained."""
    from plait.host import compose
    from plait.records.run_folder import RunFolder
    from plait.train import step_metrics
    from plait.train.trainer import Trainer, fit
    from tools.simulated_gpu.one_rank import first_of, without_values

    train_step, peak_memory = Trainer.train_step, step_metrics.peak_memory

    def stepped(trainer: Trainer) -> Any:
        window.begins(trainer.step + 1)
        return train_step(trainer)

    def measured(device: Any) -> tuple[int, str]:
        window.look()
        return peak_memory(device)  # which begins the next one

    plain = ["train.gc_interval=0", "validation.interval=0", "checkpoint.enabled=false"]
    config = compose([*plain, *overrides, f"train.steps={last + 1}"])
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        window = Window(first, last, Counter(folder))
        stack.enter_context(without_values())
        stack.enter_context(first_of(world))
        stack.enter_context(mock.patch.object(Trainer, "train_step", stepped))
        stack.enter_context(mock.patch.object(step_metrics, "peak_memory", measured))
        RunFolder(folder).write_versions({})
        fit(config, folder)
    assert window.counted is not None
    return window.counted


def kernels(counts: Counts, steps: int) -> list[str]:
    """Lines with each kernel of a step, the most frequent first."""
    named = [(calls, name) for (kind, name), (calls, _) in counts.kinds.items() if kind in LAUNCHES]
    with contextlib.suppress(OSError):  # plain names need binutils
        given = "\n".join(name for _, name in named)
        plain = subprocess.run(["c++filt"], input=given, capture_output=True, text=True, encoding="utf-8").stdout
        named = [(calls, name) for (calls, _), name in zip(named, plain.splitlines(), strict=True)]
    return [f"{calls / steps:10.1f}  {name[:140]}" for calls, name in sorted(named, reverse=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=1, help="ranks of the run")
    parser.add_argument("--steps", type=int, nargs=2, default=(3, 4), metavar=("FROM", "TO"), help="that are counted")
    parser.add_argument("--json", type=Path, help="file that the counts go to")
    parser.add_argument("--kernels", action="store_true", help="list them by name")
    asked, overrides = parser.parse_known_args()
    if not 1 <= asked.steps[0] <= asked.steps[1]:
        parser.error("--steps: FROM is at least 1 and at most TO")
    run_on_the_device()
    done = count(overrides, asked.world, *asked.steps)
    told = done.as_json()
    if asked.json:
        asked.json.write_text(json.dumps(told, indent=1), encoding="utf-8")
    print(f"{told['kernels']:10.1f}  kernels per step, {told['triton']:.1f} of them compiled by Triton")
    for name, (calls, size) in told["by name"].items():
        print(f"{calls:10.1f}  {name}, {size / 2**20:,.1f} MiB")
    for title, waits in (("marked: ", told["marked waits"]), ("", told["waits"])):
        for name, n in waits.items():
            print(f"{n:10.1f}  {title}wait for {name}")
    print(f"{told['host']:10.3f}  seconds of this processor")
    print(f"{told['peak'] / 2**30:10.2f}  GiB at the allocator's peak, {told['reserved'] / 2**30:.2f} reserved")
    if asked.kernels:
        print("\n".join(kernels(done.counts, done.steps)))


if __name__ == "__main__":
    main()
