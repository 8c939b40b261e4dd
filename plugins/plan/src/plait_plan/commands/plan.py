"""`plait plan`: predicts what a step costs a rank: memory, collectives, operators, time."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace

    from plait.host import Parser

help = "predict what a step costs: memory, collectives, time"


def arguments(parser: "Parser") -> None:
    from plait.host import one_of, whole

    parser.description = """\
Simulates one rank of the run that `plait train` would start with these overrides, with the real strategies and without
weights: memory by kind and at its peak, every collective, operators, and with a cluster the time of a step:
cluster=h100, h200, b200, a100, mi300x, cpu, or your own file conf/cluster/NAME.yaml."""
    parser.take_overrides()
    parser.take_world()
    rank = whole("rank", "the number of a rank, such as rank=0")
    parser.add_value("rank", "N", rank, "the rank to simulate (default: one that holds most)")
    routing = "worst: all tokens go to the experts of one rank, the one that is simulated (default: even)"
    parser.add_value("routing", "even|worst", one_of("routing", "even", "worst"), routing)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--all-blocks", action="store_true", help="trace every block, even if they are alike")
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="plan every combination and rank them: -m key=a,b"
    )
    parser.epilog = (
        "Exits with 3 if the run does not fit the cluster's memory, 1 after an error; with -m, only if all runs do."
    )


def run(args: "Namespace") -> int:
    from plait.host import crowded

    with crowded(args.routing == "worst"):
        return _several(args) if args.multirun else _one(args)


def _several(args: "Namespace") -> int:
    from plait.host import overrides_of
    from plait_plan.side_by_side import jobs, side_by_side

    configs = [(label, overrides_of(args, given)) for label, given in jobs(args.overrides)]
    ranking = side_by_side(configs, args.world, args.rank)
    print(_in_json(ranking.as_json()) if args.json else ranking.text())
    return ranking.code


def _one(args: "Namespace") -> int:
    from plait.host import compose, overrides_of
    from plait_plan.engine import plan
    from plait_plan.tables import page
    from plait_plan.values import FULL

    planned = plan(compose(overrides_of(args)), args.world, args.rank, args.all_blocks)
    print(_in_json(planned.as_json()) if args.json else page(planned))
    return FULL if planned.fits is False else 0


def _in_json(values: object) -> str:
    import json

    return json.dumps(values, indent=2)
