"""The system refuses: errors of calls at named points, and disks that fill up."""

import time

from tests.faults.place import SHORT
from tests.faults.scenario import Defect, Scenario, wait_for_row
from tests.faults.verdict import refused

ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS", "EDQUOT", "EMFILE")
CALLS = ("open", "os.rename", "os.mkdir")


def failing_call(scenario: Scenario) -> None:
    """One call of the system fails once, as a full, broken or protected disk makes it fail."""
    who, ended = scenario.at_a_point(scenario.rng.choice(ERRORS), events=CALLS)
    if who is not None and ended.code != 0:
        scenario.came_to(refused(scenario.place, ended))
        ended = scenario.place.run(*SHORT)
    scenario.finishes(steps=SHORT, ended=ended)


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
