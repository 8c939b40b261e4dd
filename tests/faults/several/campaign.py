"""What may befall a run on several machines, and how often."""

from collections.abc import Callable

from tests.faults.place import SEVERAL
from tests.faults.scenario import Scenario
from tests.faults.several import kinds
from tests.faults.several.cluster import Cluster
from tests.faults.several.disks import full_disk
from tests.faults.several.elastic import elastic


def on_machines(befall: Callable[[Scenario, Cluster], None]) -> Callable[[Scenario], None]:
    def scenario_of(scenario: Scenario) -> None:
        with kinds.cluster_of(scenario) as cluster:
            befall(scenario, cluster)

    return scenario_of


KINDS: dict[str, tuple[int, Callable[[Scenario], None]]] = {
    "a rank killed": (12, on_machines(kinds.rank_killed)),
    "a launcher killed": (8, on_machines(kinds.launcher_killed)),
    "a machine crashes": (16, on_machines(kinds.lost("crash"))),
    "a machine loses power": (16, on_machines(kinds.lost("power_off"))),
    "a machine told to stop": (12, on_machines(kinds.drained)),
    "a link cut": (14, on_machines(kinds.link_cut)),
    "slow links": (8, on_machines(kinds.slow_link)),
    "another clock": (6, on_machines(kinds.other_clock)),
    "another version": (5, on_machines(kinds.wrong_version)),
    "other code": (4, on_machines(kinds.wrong_code)),
    "other data": (6, on_machines(kinds.wrong_data)),
    "another command": (6, on_machines(kinds.wrong_command)),
    "a machine's disk full": (8, full_disk),
    "late machines": (10, on_machines(kinds.late)),
    "started twice": (8, on_machines(kinds.twice)),
    "machines leave and come": (20, elastic),
}
LAYOUTS = {name: share for name, (share, *_) in SEVERAL.items()}
