"""`plait plan`: predicts what a step costs a rank: memory, collectives, operators, time."""

import json
import sys

from plait.contract.errors import misfit
from plait.contract.planned import crowded
from plait.plan.values import FULL

HELP = """usage: plait plan [overrides] [world=N] [rank=N] [cluster=NAME] [routing=worst] [--json] [--all-blocks]
       plait plan -m 'key=a,b' [overrides] ...

Simulates one rank of the run that `plait train` would start with these overrides, with the real strategies and without
weights: memory by kind and at its peak, every collective, operators, and with a cluster the time of a step.
  world=N       the number of ranks (default: what the degrees and launch.* ask for)
  rank=N        the rank to simulate (default: one that holds most)
  routing=worst all tokens go to the experts of one rank, the one that is simulated (default: even)
  cluster=NAME  the machines: h100, h200, b200, a100, mi300x, cpu, or your own file conf/cluster/NAME.yaml
  --json        print JSON
  --all-blocks  trace every block, even if they are alike
  -m            plan every combination and rank them
Exits with 3 if the run does not fit the cluster's memory, 1 after an error; with -m, only if all runs do."""

FLAGS = ("--json", "--all-blocks", "-m", "--multirun")


def main(argv: list[str]) -> int:
    if any(a in ("-h", "--help") for a in argv):
        print(HELP)
        return 0
    from plait.compose.compose import asked

    flags = {a for a in argv if a in FLAGS}
    rest, worst = _routing([a for a in argv if a not in FLAGS])
    rest, rank = _rank(rest)
    overrides, world = asked(rest, "plan")
    with crowded(worst):
        return _plan(overrides, world, rank, flags)


def _plan(overrides: list[str], world: int | None, rank: int | None, flags: set[str]) -> int:
    from plait.host import compose

    if flags & {"-m", "--multirun"}:
        from plait.plan.side_by_side import jobs, side_by_side

        ranking = side_by_side(jobs(overrides), world, rank)
        print(json.dumps(ranking.as_json(), indent=2) if "--json" in flags else ranking.text())
        return ranking.code
    from plait.plan.engine import plan

    found = plan(compose(overrides), world, rank, "--all-blocks" in flags)
    if "--json" in flags:
        print(json.dumps(found.as_json(), indent=2))
    else:
        from plait.plan.tables import text

        print(text(found), file=sys.stdout)
    return FULL if found.fits is False else 0


def _routing(argv: list[str]) -> tuple[list[str], bool]:
    given = [a.partition("=")[2] for a in argv if a.startswith("routing=")]
    if given and given[-1] not in ("even", "worst"):
        raise misfit("routing", given[-1], "even or worst")
    return [a for a in argv if not a.startswith("routing=")], given[-1:] == ["worst"]


def _rank(argv: list[str]) -> tuple[list[str], int | None]:
    given = [a.partition("=")[2] for a in argv if a.startswith("rank=")]
    if given and not given[-1].isdigit():
        raise misfit("rank", given[-1], "the number of a rank, such as rank=0")
    return [a for a in argv if not a.startswith("rank=")], int(given[-1]) if given else None
