"""The system refuses: errors of calls at named points, and disks that fill up."""

import time

from tests.faults.place import SHORT
from tests.faults.scenario import Defect, Scenario, wait_for_row
from tests.faults.verdict import refused

ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS", "EDQUOT", "EMFILE")
# name -> (who, audit event, regex of its arguments, up to which match)
CALLS = {
    "opening files of the run": ("launcher", "open", r"runs/a/", 6),
    "renaming files of the run": ("launcher", "os.rename", r"runs/a/", 3),
    "making folders of the run": ("launcher", "os.mkdir", r"runs/a", 3),
    "opening the cache": ("launcher", "open", r"/cache/", 10),
    "renaming in the cache": ("launcher", "os.rename", r"/cache/", 2),
    "making a scratch folder": ("launcher", "os.mkdir", r"/tmp/", 2),
    "opening a rank's log": ("rank", "open", r"ranks/rank-", 1),
    "opening metrics": ("rank", "open", r"metrics\.jsonl", 3),
    "making a checkpoint's folder": ("rank", "os.mkdir", r"step-\d+\.tmp", 4),
    "opening shards": ("rank", "open", r"\.distcp", 8),
    "opening metadata": ("rank", "open", r"\.metadata", 6),
    "opening a manifest": ("rank", "open", r"manifest\.json", 6),
    "renaming a checkpoint": ("rank", "os.rename", r"step-\d+\.tmp", 5),
    "pruning": ("rank", "os.rename", r"step-\d+\.old", 3),
    "exporting": ("rank", "open", r"export\.tmp", 2),
    "export in place": ("rank", "os.rename", r"export", 1),
    "saying how it ended": ("rank", "os.rename", r"outcome", 1),
}


def failing_call(scenario: Scenario) -> None:
    """One call of the system fails once, as a full, broken or protected disk makes it fail."""
    rng, place = scenario.rng, scenario.place
    name, error = rng.choice(list(CALLS)), rng.choice(ERRORS)
    who, event, match, most = CALLS[name]
    fault = {"who": who, "event": event, "match": match, "nth": rng.randint(1, most), "do": error}
    mode = f"checkpoint.mode={rng.choice(['async', 'sync'])}"
    ended = place.run(*SHORT, mode, fault=fault)
    if not (place.root / "once").exists():
        scenario.notes.append(f"{name}: never reached")
        scenario.finishes(steps=SHORT, ended=ended)
        return
    scenario.plant(f"{error} while {name}")
    if ended.code == 0:
        scenario.finishes(steps=SHORT, ended=ended)
        return
    verdict = refused(place, ended)
    scenario.came_to(verdict)
    scenario.finishes(steps=SHORT)


def full_disk(scenario: Scenario) -> None:
    """A small disk for the run's folder or its checkpoints fills up while it trains; then there is room again."""
    from tests.helpers.disks import small_disk

    rng, place = scenario.rng, scenario.place
    what = rng.choice(["the run's folder", "the checkpoints' folder"])
    folder = place.work / "runs" if what == "the run's folder" else place.run_folder / "checkpoints"
    mode = rng.choice(["async", "sync"])
    folder.mkdir(parents=True)
    with small_disk(16, folder) as disk:
        place.env |= disk.env  # empty for a real disk; a played one is a library, which a new interpreter loads
        started = place.start(*SHORT, f"checkpoint.mode={mode}", cold=bool(disk.env))
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0, 4))
        elif not wait_for_row(place, started, rng.randint(1, 20)):
            raise Defect(f"it ended early: {started.text()[-1500:]}")
        disk.fill(rng.choice([0, 100, 5_000, 40_000, 150_000]))
        ended = started.wait()
        disk.empty()
        if ended.code == 0:
            scenario.notes.append("it ended before the disk was full")
            scenario.finishes(steps=SHORT, ended=ended)
            return
        scenario.plant(f"a full disk under {what}, {mode}")
        scenario.came_to(refused(place, ended, "No space|disk|room|space"))
        scenario.finishes(steps=SHORT)
