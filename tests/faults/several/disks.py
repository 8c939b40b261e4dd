"""Disks that fill up: a machine's own, with its temporary files or its tokens, or the one that all machines share."""

import contextlib
import os
import shutil
import signal
from pathlib import Path

from tests.faults.place import SHORT
from tests.faults.scenario import Scenario
from tests.faults.several.cluster import Cluster
from tests.faults.several.kinds import cluster_of, finishes, refused_on_all
from tests.faults.verdict import Defect
from tests.helpers.disks import BALLAST, CannotMount, fill, small_disk

NO_ROOM = "No space|room|disk"


def full_disk(scenario: Scenario) -> None:
    what = scenario.rng.choice([before_it_starts, tokens, while_it_trains, while_it_trains, shared, shared])
    what(scenario)


def before_it_starts(scenario: Scenario) -> None:
    with cluster_of(scenario) as cluster:
        name = scenario.rng.choice(cluster.names)
        folder = _mount(cluster, name, "64k")
        fill(folder)
        scenario.plant(f"{name}: no room for temporary files")
        launchers = cluster.start_all(*SHORT)
        cluster.until(lambda: not cluster.live())
        (folder / BALLAST).unlink()
        if not all(each.wait().code == 0 for each in launchers):
            refused_on_all(scenario, cluster, launchers, NO_ROOM)
        finishes(scenario, cluster, SHORT)


def tokens(scenario: Scenario) -> None:
    """A machine that keeps tokens on its own disk has no room for all of them."""
    rng = scenario.rng
    with cluster_of(scenario) as cluster:
        name = rng.choice(cluster.names)
        folder = _mount(cluster, name, "64k")
        free = rng.choice([8_000, 20_000])
        fill(folder, free)
        scenario.plant(f"{name}: room for {free} bytes of tokens")
        cache = {"PLAIT_CACHE": str(scenario.place.root / f"tmp-{name}" / "cache")}
        launchers = [cluster.start(each, *SHORT, **(cache if each == name else {})) for each in cluster.names]
        cluster.until(lambda: not cluster.live())
        (folder / BALLAST).unlink()
        shutil.rmtree(folder / "cache", ignore_errors=True)
        refused_on_all(scenario, cluster, launchers, NO_ROOM)
        finishes(scenario, cluster, SHORT)


def while_it_trains(scenario: Scenario) -> None:
    """A machine's own disk is full while it trains or saves, maybe as something else befalls it."""
    rng, place = scenario.rng, scenario.place
    with cluster_of(scenario) as cluster:
        name, saving = rng.choice(cluster.names), rng.random() < 0.5
        folder = _mount(cluster, name, "1m")
        launchers = cluster.start_all(*scenario.steps)
        checkpoints = place.run_folder / "checkpoints"
        going = cluster.row(rng.randint(1, scenario.last - 7))
        if going and saving:
            going = cluster.until(lambda: any(checkpoints.glob("step-*.tmp")))
        if going:
            fill(folder, rng.choice([0, 4096]))
            scenario.plant(f"{name}: no room for temporary files while it {'saves' if saving else 'trains'}")
            other = rng.choice(["nothing", "kill", "kill", "told to stop"])
            if other == "kill" and (ranks := cluster.ranks_of(rng.choice(cluster.names))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ranks[0], signal.SIGKILL)
                scenario.plant("a rank: SIGKILL beside a full disk")
            elif other == "told to stop":
                launchers[cluster.names.index(name)].signal(signal.SIGTERM)
                scenario.plant(f"{name}: told to stop with a full disk")
            cluster.until(lambda: len(cluster.live()) < len(cluster.names))
        (folder / BALLAST).unlink(missing_ok=True)
        finishes(scenario, cluster, scenario.steps)


def shared(scenario: Scenario) -> None:
    """The disk with the run's folder, or its checkpoints, is full while it trains or saves: it ends on all machines."""
    rng, place = scenario.rng, scenario.place
    what = rng.choice(["run's folder", "checkpoints"])
    at = place.work / "runs" if what == "run's folder" else place.run_folder / "checkpoints"
    with contextlib.ExitStack() as held:
        try:
            disk = held.enter_context(small_disk(16, at))
            if disk.env:
                raise CannotMount("it needs root")
        except CannotMount as error:
            scenario.notes.append(f"no full disk here: {error}")
            return
        cluster = held.enter_context(cluster_of(scenario))
        mode = rng.choice(["async", "sync"])
        launchers = cluster.start_all(*SHORT, f"checkpoint.mode={mode}")
        if not cluster.row(rng.randint(1, 18)):
            raise Defect(f"it ended early:\n{cluster.text()}")
        disk.fill(rng.choice([0, 5_000, 40_000, 150_000]))
        cluster.until(lambda: not cluster.live())
        disk.empty()
        if all(each.wait().code == 0 for each in launchers):
            scenario.notes.append("it ended before the disk was full")
        else:
            scenario.plant(f"the shared disk of the {what}: full, {mode}")
            refused_on_all(scenario, cluster, launchers, NO_ROOM)
        finishes(scenario, cluster, SHORT)


def _mount(cluster: Cluster, name: str, size: str) -> Path:
    """A disk of this size with the temporary files of this machine."""
    folder = cluster.place.root / f"tmp-{name}"
    folder.mkdir()
    cluster[name].run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    return cluster.own(name, "tmp")
