"""`plait plan --smallest KEY` and `--largest KEY`: the value at which a run begins, or ceases, to fit."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from plait import Cluster, Config, PlaitError, near_miss
from plait.host import compose, one_line, text
from plait_plan.edge import edge
from plait_plan.job import PlannedJob, Request
from plait_plan.telling import Telling
from plait_plan.values import Plan

MOST_RANKS, MOST = 2**16, 2**24


@attrs.frozen
class Limit:
    """request, plan: the run with the value. beyond: the next value, which does not fit, and its plan. sure: no value
    between them, or if there is no such value no further one, can be. tried: the furthest value tried. refused: the
    nearest value beyond that no run can have, and the reason."""

    key: str
    value: int
    largest: bool
    request: Request
    plan: Plan
    beyond: tuple[int, Plan] | None
    sure: bool
    tried: int
    refused: tuple[int, str] | None = None

    def text(self) -> str:
        kind = ("largest" if self.largest else "smallest") + ("" if self.sure else " found")
        said = f"{self.key}={self.value} is the {kind} that fits"
        if self.beyond is None and self.sure:
            return f"{said}, and no {'larger' if self.largest else 'smaller'} one is possible"
        if self.beyond is None:
            why = "; with {}={}: {}".format(self.key, *self.refused) if self.refused else ""
            return f"{said}; values {'up' if self.largest else 'down'} to {self.tried} were tried, but not all{why}"
        value, plan = self.beyond
        between = "" if self.sure else "; not every value between was tried"
        return f"{said}; with {self.key}={value} {text.size(-(plan.free or 0))} are too much{between}"

    def as_json(self) -> dict[str, Any]:
        beyond = self.beyond[0] if self.beyond else None
        return {"key": self.key, "value": self.value, "beyond": beyond, "sure": self.sure}


def found(request: Request, label: str, key: str, largest: bool) -> PlannedJob:
    """The run of one line of a table."""
    try:
        reached = limit(request, key, largest, label)
    except PlaitError as error:
        return PlannedJob(label, why=one_line(error))
    told = " ".join(part for part in (label, f"{reached.key}={reached.value}") if part)
    return PlannedJob(told, reached.plan, cost=reached.request.cost(reached.plan))


def limit(request: Request, key: str, largest: bool, label: str = "", to: Callable[[str], None] | None = None) -> Limit:
    """Raises PlaitError if no value fits, there is no cluster, or the key has no whole number.

    A line is told of each value that was tried, and one after each 8 seconds without. label: of the run among several.
    to: gets the lines; None: standard error.
    """
    option, (cluster, number) = _option(largest), begun(compose(request.overrides), key, largest)
    key = key if key == "world" or "." in key else f"train.{key}"
    if number is None:
        values: Sequence[int] = worlds(cluster)
        start = values.index(request.world) if request.world in values else min(cluster.node, len(values)) - 1
    else:
        values, start = range(1, MOST), number - 1
    plans = PlansByValue(lambda value: request.changed({key: value}))
    told = f"plan: {label} {key}" if label else f"plan: {key}"
    with Telling(lambda seconds: f"{told}={plans.now} is tried, {seconds:.0f} s so far", to) as tell:

        def free(value: Any) -> float | None:
            left = plans.free(value)
            if left is not None:
                tell(f"{told}={value}: {text.size(abs(left))} are {'left' if left >= 0 else 'too much'}")
            else:
                tell(f"{told}={value} is refused: {one_line(plans.errors[value])}")
            return left

        inside, outside = edge(values, free, start, rising=largest, inverse=key == "world")
    if inside is None:
        if outside is None and plans.error is not None:
            raise plans.error
        assert outside is not None
        raise PlaitError(
            f"no {key} fits on {cluster.name}: with {key}={outside} {text.size(-(plans.of(outside).free or 0))} are "
            f"too much; plait plan without {option} says what would help"
        ).at(key, outside)
    beyond = None if outside is None else (outside, plans.of(outside))
    place = values.index(inside)
    low, high = sorted((place, -1 if outside is None else values.index(outside)))
    sure = not (largest and outside is None) and plans.tried.issuperset(values[low + 1 : high])
    tried = (max if largest else min)(plans.tried)
    reasons = {value: error for value, error in plans.errors.items() if (value > inside) == largest}
    nearest = (min if largest else max)(reasons, default=None)
    refused = None if nearest is None else (nearest, one_line(reasons[nearest]))
    return Limit(key, inside, largest, request.changed({key: inside}), plans.of(inside), beyond, sure, tried, refused)


class PlansByValue:
    """Plans by a value, each made once. tried: of which `free` was asked, last of `now`. errors: why one cannot be."""

    def __init__(self, request: Callable[[Any], Request]) -> None:
        self._ask = request
        self._made: dict[Any, Plan] = {}
        self.tried: set[Any] = set()
        self.now: Any = None
        self.errors: dict[Any, PlaitError] = {}

    @property
    def error(self) -> PlaitError | None:
        """The last of them."""
        return next(reversed(self.errors.values()), None)

    def of(self, value: Any) -> Plan:
        if value not in self._made:
            self._made[value] = self._ask(value).plan()
        return self._made[value]

    def free(self, value: Any) -> float | None:
        """Bytes that are left, None if there can be no such run."""
        self.now = value
        self.tried.add(value)
        try:
            return self.of(value).free
        except PlaitError as error:
            self.errors[value] = error
            return None


def worlds(cluster: Cluster) -> list[int]:
    """Numbers of ranks that one rents: any on one machine, beyond it whole machines."""
    return [*range(1, cluster.node + 1), *range(2 * cluster.node, MOST_RANKS + 1, cluster.node)]


def begun(config: Config, key: str, largest: bool) -> tuple[Cluster, int | None]:
    """The machines, and the whole number that `config` has at `key`, from which to begin; None of "world".

    Raises PlaitError if there is no cluster, or the key has no whole number.
    """
    cluster, option = Cluster.of(config.cluster), _option(largest)
    if cluster is None:
        raise PlaitError(f"{option} needs to know the machines' memory: cluster=h100").at("cluster")
    if key == "world" and largest:
        raise PlaitError("more ranks need no more memory each, so --largest world has no answer; use --smallest").at(
            option, key, fits="--smallest world"
        )
    return cluster, None if key == "world" else _whole_number(config.plain(), key, option)


def _whole_number(config: dict[str, Any], key: str, option: str) -> int:
    full = key if "." in key else f"train.{key}"
    such = "world, train.seq_len, train.local_batch_size"
    value: Any = config
    for part in full.split("."):
        if isinstance(value, dict) and part not in value and "_target_" not in value:  # others take more than they have
            near = near_miss(part, [*(() if "." in key else ("world",)), *value])
            raise PlaitError(f"{option} {key}: there is no key {full}; such as {such}{near}").at(option, key, such)
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlaitError(
            f"{option} {key}: the run has no whole number there from which to begin; such as {such}; if {full} exists, "
            "give it a value"
        ).at(option, key, such)
    return value


def _option(largest: bool) -> str:
    return "--largest" if largest else "--smallest"
