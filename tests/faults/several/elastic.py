"""Machines that leave and come in random order. In float64 every step is that of one process, within 1e-9."""

import contextlib
import json
import os
import signal
from pathlib import Path

from tests.faults.scenario import Scenario
from tests.faults.several.cluster import Cluster, Launcher
from tests.faults.several.kinds import TOGETHER
from tests.faults.verdict import NUMBERS, Defect

BOUND = 1e-9
LAYOUT = "elastic"
STEPS = ("train.steps=1000", "checkpoint.interval=10", "validation.interval=0")


def elastic(scenario: Scenario) -> None:
    rng, place = scenario.rng, scenario.place
    place.layout = LAYOUT
    with Cluster(place, 3, 1, TOGETHER, "1:3") as cluster:
        present: dict[str, Launcher] = {}
        for name in rng.sample(cluster.names, rng.randint(1, 3)):
            present[name] = cluster.start(name, *STEPS)
        if "alpha" not in present:
            present["alpha"] = cluster.start("alpha", *STEPS)
        cluster.row(1)
        for _ in range(rng.randint(3, 6)):
            _change(scenario, cluster, present)
            cluster.sleep(rng.uniform(0, 2)) if rng.random() < 0.3 else cluster.row(
                cluster.last_row() + rng.randint(1, 12)
            )
        _stop(scenario, cluster, present)
        scenario.came_to(_compared(scenario, place.run_folder))


def _change(scenario: Scenario, cluster: Cluster, present: dict[str, Launcher]) -> None:
    """The last machine stays. The one that holds the store leaves by itself only if all train, so that another may take
    its place."""
    rng = scenario.rng
    absent = [name for name in cluster.names if name not in present]
    holder = "" if _world_size(scenario) == len(present) else _holder(scenario, cluster)
    leavers = [name for name in present if name != holder]
    several = len(present) > 1
    what = rng.choice(
        [
            *(["come"] * 4 if absent else []),
            "kill",
            *(("leave", "leave") if several and leavers else ()),
            *(("crash", "power_off") if several else ()),
        ]
    )
    name = rng.choice(absent if what == "come" else leavers if what == "leave" else [*present])
    scenario.plant(f"{name}: {what}")
    if what == "come":
        present[name] = cluster.start(name, *STEPS)
    elif what == "kill":
        if ranks := cluster.ranks_of(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks[0], signal.SIGKILL)
    else:
        launcher = present.pop(name)
        if what == "leave":
            launcher.signal(signal.SIGTERM)
            cluster.until(launcher.ended)
            cluster.judge(launcher, 143)
        else:
            cluster.lose(name, what)
            cluster[name].boot()


def _world_size(scenario: Scenario) -> int:
    """That of the last step."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return json.loads((scenario.place.run_folder / "metrics.jsonl").read_text().splitlines()[-1])["world_size"]
    return 0


def _holder(scenario: Scenario, cluster: Cluster) -> str:
    """The name of the machine that holds the store; the endpoint's before one has said so."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        host = json.loads((scenario.place.run_folder / ".host").read_text()).get("host")
        return next((name for name in cluster.names if host in (name, cluster[name].address)), "alpha")
    return "alpha"


def _stop(scenario: Scenario, cluster: Cluster, present: dict[str, Launcher]) -> None:
    """Ctrl-C on the machine that holds the store ends the run on all; SIGTERM to the others if it has moved."""
    if not cluster.live():
        raise Defect(f"the run has ended:\n{cluster.text()}")
    before = cluster.last_row()
    holder = _holder(scenario, cluster)
    present[holder if holder in present else next(iter(present))].signal(signal.SIGINT)
    with contextlib.suppress(Defect):
        cluster.until(lambda: not cluster.live(), 15)
    for launcher in cluster.live():
        launcher.signal(signal.SIGTERM)
    cluster.until(lambda: not cluster.live())
    for launcher in present.values():
        cluster.judge(launcher, 0, 1, 130, 143)  # 1: one that came as the holder left
    cluster.clean()
    if cluster.last_row() < before:
        raise Defect(f"steps are lost: {cluster.last_row()} rows, and before there were {before}")


def _compared(scenario: Scenario, run: Path) -> str:
    ours = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if [row["step"] for row in ours] != list(range(1, len(ours) + 1)):
        raise Defect(f"the steps are {[row['step'] for row in ours]}")
    theirs = scenario.reference(LAYOUT, STEPS).numbers
    for mine, other in zip(ours, (dict(zip(NUMBERS, row, strict=True)) for row in theirs), strict=False):
        for key in ("loss", "grad_norm", "tokens"):
            if abs(mine[key] - other[key]) > BOUND * abs(other[key]):
                raise Defect(f"{key} of step {mine['step']} is {mine[key]!r} instead of {other[key]!r}")
    return "equal"
