"""Traced steps of a run, on all cores of the machine, and kept on its disk for later processes."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from plait import Config
from plait.host import is_crowded
from plait_plan.cores import as_they_end
from plait_plan.shelf import Shelf, named_files
from plait_plan.tracing.blocks import Group
from plait_plan.tracing.documents import told_apart
from plait_plan.tracing.kernels import planned_device
from plait_plan.tracing.recorder import Operator
from plait_plan.tracing.remembered import has_traced
from plait_plan.tracing.reserved import Pools
from plait_plan.tracing.trace import StepTrace, trace

DECIDES = ("model", "strategy", "optimizer", "train", "precision", "remat", "compile", "loss")
DISK = Shelf("traces")

TraceArguments = tuple[Config, int, int, int, list[int] | None, bool, bool]  # of `trace`


def steps(jobs: list[TraceArguments]) -> Iterator[StepTrace]:
    """`trace(*job)` of each, in order; those that were not kept are traced beside each other."""
    keys = [["step", *depends_on(config), *given] for config, *given in jobs]
    found = {place: of_arrays(entry) for place, key in enumerate(keys) if (entry := DISK.get(key)) is not None}
    rest = [place for place in range(len(jobs)) if place not in found]
    coming = as_they_end(trace, [jobs[place] for place in rest], first_here=not has_traced())
    for place in range(len(jobs)):
        while place not in found:
            at, one = next(coming)
            found[rest[at]] = one
            DISK.keep(keys[rest[at]], as_arrays(one))
        yield found[place]


def depends_on(config: Config) -> list[Any]:
    """What a step of a run follows from, beside its ranks, as plain values."""
    relevant = {name: value for name, value in config.plain().items() if name in DECIDES}
    return [relevant, named_files(relevant), told_apart(config), is_crowded(), planned_device(config)]


def as_arrays(one: StepTrace) -> dict[str, np.ndarray]:
    """A step of a whole model: it has no spans."""
    values = {
        "operators": [attrs.astuple(operator) for operator in one.operators],
        "places": one.places,
        "groups": [group.fqns for group in one.groups],
        "micro": one.micro,
        "members": one.members,
        "grows": one.grows,
        "gaps": one.pools.gaps,
    }
    numbers = {"levels": one.levels, "pools": one.pools.levels, "weights": one.weights}
    arrays = {name: np.array(rows, np.int64) for name, rows in numbers.items()}
    return {"values": np.frombuffer(json.dumps(values).encode(), np.uint8), **arrays}


def of_arrays(arrays: Mapping[str, np.ndarray]) -> StepTrace:
    values: dict[str, Any] = json.loads(arrays["values"].tobytes())
    return StepTrace(
        operators=[Operator(*each) for each in values["operators"]],
        levels=arrays["levels"].tolist(),
        places={fqn: (group, place) for fqn, (group, place) in values["places"].items()},
        groups=[Group(tuple(fqns)) for fqns in values["groups"]],
        micro=tuple(values["micro"]),
        members={axis: tuple(ranks) for axis, ranks in values["members"].items()},
        grows=tuple(values["grows"]),
        pools=Pools(arrays["pools"].tolist(), tuple(values["gaps"])),
        weights=arrays["weights"].tolist(),
    )
