"""`plait plan`: what a step of a run costs a rank, worked out on this machine: memory, collectives, operators, time."""

import json
import sys
from typing import Any

from plait.contract.errors import PlaitError

HELP = """usage: plait plan [overrides] [world=N] [rank=N] [cluster=NAME] [--json] [--all-blocks]
       plait plan -m 'key=a,b' [overrides] ...

Simulates one rank of the run that `plait train` would start with these overrides, with the real strategies and without
weights: memory by kind and at its peak, every collective, operators, and with a cluster the time of a step.
  world=N       for N ranks (default: what the degrees and launch.* ask for)
  rank=N        of rank N (default: one that holds most)
  cluster=NAME  on these machines: h100, h200, b200, a100, mi300x, cpu, or a file conf/cluster/NAME.yaml of your own
  --json        as JSON
  --all-blocks  trace every block, even if they are alike
  -m            plan every combination and rank them
Exits with 3 if it does not fit the cluster's memory, 1 after an error."""

FULL = 3  # the exit code if it does not fit
FLAGS = ("--json", "--all-blocks", "-m", "--multirun")


def main(argv: list[str]) -> int:
    if any(a in ("-h", "--help") for a in argv):
        print(HELP)
        return 0
    from plait.launch.compose import asked, resolve

    flags = {a for a in argv if a in FLAGS}
    rest, rank = _rank([a for a in argv if a not in FLAGS])
    overrides, world = asked(rest, "plan")
    if flags & {"-m", "--multirun"}:
        from plait.plan.side_by_side import jobs, side_by_side

        found = side_by_side(jobs(overrides), world, rank)
        print(json.dumps(found.as_json(), indent=2) if "--json" in flags else found.text())
        return 0 if found.fits else FULL
    plan = planned(resolve(overrides), world, rank, "--all-blocks" in flags)
    if "--json" in flags:
        print(json.dumps(plan.as_json(), indent=2))
    else:
        from plait.plan.tables import text

        print(text(plan), file=sys.stdout)
    return FULL if plan.fits is False else 0


def planned(node: dict[str, Any], world: int | None, rank: int | None, every: bool = False) -> Any:
    """The plan; what cannot be planned becomes a sentence. torch's own remarks about collectives are left out."""
    import logging

    from plait.plan.engine import plan

    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    return plan(node, world, rank, every)


def _rank(argv: list[str]) -> tuple[list[str], int | None]:
    given = [a.partition("=")[2] for a in argv if a.startswith("rank=")]
    if given and not given[-1].isdigit():
        raise PlaitError(f"rank={given[-1]} must be the number of a rank, such as rank=0")
    return [a for a in argv if not a.startswith("rank=")], int(given[-1]) if given else None
