"""One scenario of the campaign: a run, what befalls it, and the faults that were really planted."""

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from tests.faults.place import Ended, Sandbox, Started
from tests.faults.verdict import Defect, Reference, clean, equal


@attrs.define
class Scenario:
    """rng: decides everything that is random. reference(layout, overrides): what the undisturbed run left.
    base(layout): a folder with a run that was stopped in the middle. planted: (fault, verdict) so far."""

    rng: random.Random
    place: Sandbox
    reference: Callable[[str, tuple[str, ...]], Reference]
    base: Callable[[str, bool], Path]
    planted: list[tuple[str, str]] = attrs.field(factory=list)
    pending: list[str] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)

    def plant(self, fault: str) -> None:
        """A fault happens now; what comes of it is known later."""
        self.pending.append(fault)
        self.notes.append(fault)

    def came_to(self, verdict: str) -> None:
        """What came of all faults that wait for a verdict."""
        self.planted += [(fault, verdict) for fault in self.pending]
        self.pending.clear()

    def finishes(self, *overrides: str, steps: tuple[str, ...], ended: Ended | None = None) -> None:
        """The same command, given until it is done, ends bitwise as the undisturbed run."""
        ended = ended or self.place.run(*steps, *overrides)
        self.came_to(equal(self.place, ended, self.reference(self.place.layout, steps)))


def wait_for_row(place: Sandbox, started: Started, step: int, seconds: float = 120) -> bool:
    """Whether metrics.jsonl got to `step` before the command ended. Raises Defect after `seconds` without a new row."""
    path, mark, before, since = place.run_folder / "metrics.jsonl", f'{{"step": {step},', "", time.monotonic()
    while time.monotonic() < since + seconds:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            rows = path.read_text()
            if mark in rows:
                return True
            if rows != before:
                before, since = rows, time.monotonic()
        if started.ended():
            return False
        time.sleep(0.005)
    raise Defect(f"no new row for {seconds:.0f} s, before step {step}: {started.text()[-1500:]}")


def last_row(place: Sandbox) -> int:
    try:
        lines = (place.run_folder / "metrics.jsonl").read_text().splitlines()
        return int(lines[-1].split(",")[0].rpartition(" ")[2]) if lines else 0
    except (OSError, ValueError, IndexError):
        return 0


def newest(place: Sandbox) -> int:
    """The step of the newest complete checkpoint; 0 if there is none."""
    steps = [int(m.parent.name.removeprefix("step-")) for m in place.run_folder.glob("checkpoints/step-*/manifest.json")
             if m.parent.name.removeprefix("step-").isdigit()]  # fmt: skip
    return max(steps, default=0)


__all__ = ["Defect", "Scenario", "clean", "last_row", "newest", "wait_for_row"]
