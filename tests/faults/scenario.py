"""One scenario of the campaign: a run, what befalls it, and the faults that were really planted."""

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from tests.faults.place import LONG, SHORT, Ended, Sandbox, Started
from tests.faults.verdict import Defect, Reference, clean, equal

# name -> (who, audit event, regex of its arguments, up to which match)
POINTS = {
    "composing": ("launcher", "import", r"hydra\._internal\.hydra|omegaconf\.resolvers|plait\.contract\.schema", 1),
    "checking": ("launcher", "import", r"plait\.(check\.(check|prepare)|strategies\.hooks|train\.optimizer)\b", 4),
    "preparing data": ("launcher", "open", r"/cache/", 12),
    "data in place": ("launcher", "os.rename", r"/cache/", 2),
    "making a scratch folder": ("launcher", "os.mkdir", r"/tmp/", 2),
    "making the folder": ("launcher", "os.mkdir", r"runs/a", 3),
    "taking the folder": ("launcher", "open", r"runs/a/", 6),
    "writing the config": ("launcher", "os.rename", r"runs/a/", 3),
    "starting ranks": ("launcher", "subprocess.Popen", r"plait\.launch\.fork_server", 1),
    "a rank begins": ("rank", "open", r"ranks/rank-", 1),
    "a rank builds": ("rank", "import", r"plait\.(models|data|checkpoint)\.\w+$|safetensors", 3),
    "first step": ("rank", "open", r"metrics\.jsonl", 3),
    "making a checkpoint's folder": ("rank", "os.mkdir", r"step-\d+\.tmp", 4),
    "writing shards": ("rank", "open", r"\.distcp", 8),
    "writing metadata": ("rank", "open", r"\.tmp/\.metadata", 8),
    "renaming metadata": ("rank", "os.rename", r"\.metadata", 4),
    "writing the manifest": ("rank", "open", r"manifest\.json", 8),
    "renaming a checkpoint": ("rank", "os.rename", r"step-\d+\.tmp", 5),
    "before pruning": ("rank", "os.rename", r"step-\d+\.old", 3),
    "pruning": ("rank", "os.remove", r"", 12),
    "removing a folder": ("rank", "os.rmdir", r"", 3),
    "pruning a tree": ("rank", "shutil.rmtree", r"step-", 8),
    "exporting": ("rank", "open", r"export\.tmp", 2),
    "export in place": ("rank", "os.rename", r"export", 1),
    "saying how it ended": ("rank", "os.rename", r"outcome", 1),
    "ending": ("launcher", "open", r"outcome\.json", 2),
}


@attrs.define
class Scenario:
    """rng: decides everything that is random. reference(layout, overrides): what the undisturbed run left.
    base(layout): a folder with a run that was stopped in the middle. planted: (fault, verdict) so far.
    steps: of a run on several machines."""

    rng: random.Random
    place: Sandbox
    reference: Callable[[str, tuple[str, ...]], Reference]
    base: Callable[[str, bool], Path]
    planted: list[tuple[str, str]] = attrs.field(factory=list)
    pending: list[str] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)
    steps: tuple[str, ...] = LONG[:2]

    @property
    def last(self) -> int:
        """The last step at which something befalls the run: it still has some seconds before its end."""
        return int(self.steps[0].rpartition("=")[2]) * 5 // 6

    def plant(self, fault: str) -> None:
        """A fault happens now; what comes of it is known later."""
        self.pending.append(fault)
        self.notes.append(fault)

    def came_to(self, verdict: str) -> None:
        """What came of all faults that wait for a verdict."""
        self.planted += [(fault, verdict) for fault in self.pending]
        self.pending.clear()

    def at_a_point(
        self, do: str, *, whom: tuple[str, ...] = ("launcher", "rank"), events: tuple[str, ...] = ()
    ) -> tuple[str | None, Ended]:
        """(to whom the signal or errno `do` happened; None: the point was not reached, how the run ended)."""
        names = [name for name, (who, event, *_) in POINTS.items() if who in whom and event in (events or (event,))]
        name = self.rng.choice(names)
        who, event, match, most = POINTS[name]
        fault = {"who": who, "event": event, "match": match, "nth": self.rng.randint(1, most), "do": do}
        mode = f"checkpoint.mode={self.rng.choice(['async', 'sync'])}"
        ended = self.place.run(*SHORT, mode, fault=fault, cold=event == "import")  # a fork imports little
        if not (self.place.root / "once").exists():
            self.notes.append(f"{name}: never reached")
            return None, ended
        self.plant(f"{do} while {name}")
        return who, ended

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
