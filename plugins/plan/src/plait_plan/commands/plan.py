"""`plait plan`: predicts what a step costs a rank: memory, collectives, operators, time, and what a run costs."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from plait.host import Parser
    from plait_plan.job import Request

help = "predict what a step costs: memory, collectives, time, money"
SELDOM = (50_000, 20, 100)  # thresholds of `gc`: what a plan makes is mostly kept, and looking through it takes 15%


def arguments(parser: "Parser") -> None:
    from plait.host import one_of, whole

    parser.description = """\
Simulates one rank of the run that `plait train` would start with these overrides, with the real strategies and without
weights: whether it fits, the time of a step, what so many tokens cost; then memory by kind and at its peak, every
collective, and operators. Time and money need the machines: cluster=h100, h200, b200, a100, mi300x, cpu, or your own
file conf/cluster/NAME.yaml. If a run does not fit, the nearest that do are named."""
    parser.take_overrides()
    parser.add_value("world", "N", _worlds, "the number of ranks (default: what the degrees and launch.* request for)")
    rank = whole("rank", "the number of a rank, such as rank=0")
    parser.add_value("rank", "N", rank, "the rank to simulate (default: one that holds most)")
    routing = "worst: all tokens go to the experts of one rank, the one that is simulated (default: even)"
    parser.add_value("routing", "even|worst", one_of("routing", "even", "worst"), routing)
    parser.add_value("tokens", "N", _tokens, "the tokens to train on, such as 1e12: tells days")
    parser.add_value("price", "USD", _prices, "dollars per device and hour: 2.5, or h100:2.5,h200:3.8; needs tokens=N")
    parser.add_argument("--smallest", metavar="KEY", help="the smallest value of KEY that fits, such as world")
    parser.add_argument("--largest", metavar="KEY", help="the largest value of KEY that fits, such as train.seq_len")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--all-blocks", action="store_true", help="trace every block, even if they are alike")
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="plan every combination and rank them: -m key=a,b world=8,16"
    )
    parser.epilog = (
        "Exits with 3 if the run does not fit the cluster's memory, 1 after an error; with -m, only if all runs do."
    )


def run(args: "Namespace") -> int:
    import gc

    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        return _run(args)
    finally:
        gc.set_threshold(*before)


def _run(args: "Namespace") -> int:
    from plait.host import crowded
    from plait_plan.cores import processes_stay
    from plait_plan.telling import Telling

    _check(args)
    with crowded(args.routing == "worst"), Telling(lambda seconds: f"plan: {seconds:.0f} s so far"), processes_stay():
        return _several(args) if args.multirun else _one(args)


def _several(args: "Namespace") -> int:
    from plait_plan.job import planned
    from plait_plan.limits import found
    from plait_plan.side_by_side import jobs, side_by_side

    wanted: list[tuple[str, Request]] = []
    for label, given in jobs(args.overrides):
        for world in args.world or [None]:
            more = f"world={world}" if len(args.world or ()) > 1 else ""
            wanted.append((" ".join(part for part in (label, more) if part), _request(args, given, world)))
    _check_prices([request for _, request in wanted])
    limit = _limit(args)
    ranking = side_by_side(wanted, (lambda request, label: found(request, label, *limit)) if limit else planned)
    _told_without_time(args, any(job.plan is not None and job.cost is None for job in ranking.jobs))
    print(_in_json(ranking.as_json()) if args.json else ranking.text())
    return ranking.code


def _one(args: "Namespace") -> int:
    from plait.host import compose
    from plait_plan.limits import begun, limit

    request = _request(args, args.overrides, args.world[0] if args.world else None)
    config, wanted = compose(request.overrides), _limit(args)
    if wanted:
        begun(config, *wanted)  # before torch is imported: a mistake is answered at once

    from plait_plan.advice import advise
    from plait_plan.cost import in_json
    from plait_plan.tables import page
    from plait_plan.values import FULL
    from plait_plan.verdict import verdict

    _check_prices([request])
    more: dict[str, Any] = {}
    if wanted:
        reached = limit(request, *wanted)
        request, planned = reached.request, reached.plan
        more["limit"] = reached.as_json()
        if not args.json:
            print(f"{reached.text()}\n")
    else:
        planned = request.plan()
    cost = request.cost(planned)
    _told_without_time(args, cost is None)
    if not args.json:
        print("\n".join(verdict(planned, cost)), end="\n\n", flush=True)
    if planned.fits is False:
        advice = advise(request, planned)
        more["instead"] = [job.as_json() for job in advice.jobs]
        if not args.json:
            print(advice.text(), end="\n\n", flush=True)
    if args.json:
        print(_in_json({**planned.as_json(), "cost": in_json(cost), **more}))
    else:
        print(page(planned))
    return FULL if planned.fits is False else 0


def _request(args: "Namespace", overrides: list[str], world: int | None) -> "Request":
    from plait.host import overrides_of
    from plait_plan.job import Request

    return Request(overrides_of(args, overrides), world, args.rank, args.all_blocks, args.tokens, args.price or {})


def _limit(args: "Namespace") -> tuple[str, bool] | None:
    """(key, whether the largest value is wanted)."""
    key = args.largest or args.smallest
    return (key, args.largest is not None) if key else None


def _check(args: "Namespace") -> None:
    from plait import PlaitError

    for option, key in (("--smallest", args.smallest), ("--largest", args.largest)):
        if key and "=" in key:
            said = f"{option} takes the name of a key, such as train.seq_len; {key!r} is a key with a value"
            raise PlaitError(said).at(option, key, fits="the name of a key")
    if args.smallest and args.largest:
        raise PlaitError("--smallest and --largest exclude each other; give one").at("--smallest")
    if args.price and args.tokens is None:
        raise PlaitError("price= needs tokens=N, the number of tokens to train on, such as tokens=1e12").at("tokens")
    if len(args.world or ()) > 1 and not args.multirun:
        worlds = ",".join(map(str, args.world))
        raise PlaitError(f"world={worlds} are several values; plait plan -m plans each").at("world", worlds, fits="-m")


def _check_prices(requests: "list[Request]") -> None:
    """Raises PlaitError if prices have names, and none is of a cluster that is planned; says which have none."""
    import sys

    from plait import misfit

    prices = requests[0].prices
    without = dict.fromkeys(request.cluster for request in requests if request.cluster not in prices)
    if not prices or "" in prices or not without:
        return
    if all(request.cluster in without for request in requests):
        given = ",".join(f"{name}:{dollars:g}" for name, dollars in prices.items())
        named = f" (price={','.join(f'{name}:USD' for name in without)})" if all(without) else ""
        raise misfit("price", given, f"of a cluster that is planned{named}, or of any (price=USD)")
    print(f"plait: price= has none of cluster={','.join(without)}, so its dollars are not told", file=sys.stderr)


def _told_without_time(args: "Namespace", without: bool) -> None:
    """Says why a plan has no cost though tokens are given, if it is `without`."""
    import sys

    if args.tokens is not None and without:
        what = "tokens= and price= tell days and money" if args.price else "tokens= tells days"
        print(f"plait: {what} only if the machines are named, such as cluster=h100", file=sys.stderr)


def _worlds(value: str) -> list[int]:
    from plait.host import whole

    fits = "a number of ranks, at least 1, such as world=4, or with -m several, such as world=8,16"
    return [whole("world", fits, 1)(each) for each in value.split(",")]


def _tokens(value: str) -> float:
    return _positive("tokens", value, "a number of tokens, such as tokens=1e12")


def _prices(value: str) -> dict[str, float]:
    """By the name of a cluster; "": of any."""
    fits = "dollars per device and hour, such as price=2.5 or price=h100:2.5,h200:3.8"
    pairs = [each.rpartition(":")[::2] for each in value.split(",")]
    return {name: _positive("price", dollars, fits) for name, dollars in pairs}


def _positive(name: str, value: str, fits: str) -> float:
    from plait import PlaitError

    try:
        if 0 < (number := float(value)) < float("inf"):
            return number
    except ValueError:
        pass
    raise PlaitError(f"{name} is {value!r}; it must be {fits}").at(name, value, fits=fits)


def _in_json(values: object) -> str:
    import json

    return json.dumps(values, indent=2)
