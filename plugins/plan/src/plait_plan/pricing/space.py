"""Every composition of the strategies that offer choices whose mesh fits the world."""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import nn

from plait import Choice, MeshAxis, MeshLayout, MeshView, ModelSpec, PlaitError, Run, StagePlan, join_axes
from plait.host import hooks_of, one_line, plugins
from plait_plan.ranks import degrees

Axes = list[MeshAxis | MeshView]


@attrs.frozen
class Alternative:
    """One setting of a strategy's choices. sets: those that only set the number of ranks of an axis -> that axis."""

    name: str
    options: dict[str, Any]
    instance: Any
    axes: Axes
    sets: dict[str, MeshAxis]

    @property
    def ranks(self) -> int:
        product = 1
        for axis in self.axes:
            product *= axis.degree if isinstance(axis, MeshAxis) else 1
        return product


@attrs.frozen
class Composition:
    """Strategies with their options, in order of their names, and their mesh.

    pieces: the mesh of the ranks that have the same layers; a step of them is traced with the whole model. divides: the
    strategy that divides the layers, if one does.
    family: equal for compositions that differ only in the degrees of axes that split the batch or the layers; those
    with one shard of parameters and those with several are two, because strategies may compute otherwise without
    shards. kin: equal for those on as many ranks that differ only in degrees. inner: the axes that split neither, and
    whose degrees may differ among kin. core: equal for compositions whose modules compute alike, because the strategies
    that change what modules compute are equal.
    """

    strategies: dict[str, dict[str, Any]]
    layout: MeshLayout
    pieces: MeshLayout
    divides: str | None
    family: str
    kin: str
    inner: dict[str, int]
    core: str

    def text(self) -> str:
        return json.dumps(self.strategies, sort_keys=True)


def offering(run: Run) -> dict[str, Any]:
    """Name -> instance of each installed strategy that offers choices, if it can be used in this run."""
    found = {}
    for name, plugin in plugins.installed().items():
        if plugin.state == "ok" and name not in run.strategies and hasattr(plugins.load(name), "choices"):
            found[name] = plugins.create(name, {})
    return found


def compositions(run: Run, offered: Mapping[str, Any]) -> tuple[list[Composition], dict[str, str]]:
    """(all that fit the run's world, strategy -> why it cannot take part), for strategies `offered` by name.

    Strategies that the run has already selected take part in each, as they are.
    """
    fixed = [_fixed(run, name, strategy) for name, strategy in run.strategies.items()]
    reasons: dict[str, str] = {}
    choices = []
    for name, strategy in sorted(offered.items()):
        ways, why = _alternatives(run, name, strategy)
        if not ways and why:
            reasons[name] = why
        choices.append([None, *ways])
    found: dict[str, Composition] = {}
    for picked in _products(choices, run.world_size):
        composition = _composed(run, [*fixed, *picked], {a.name for a in fixed})
        if composition is not None:
            found.setdefault(composition.text(), composition)
    return [found[text] for text in sorted(found)], reasons


def _products(choices: list[list[Any]], world: int) -> Iterator[list[Alternative]]:
    """At most one alternative of each strategy, with a total number of ranks that divides the world."""
    if not choices:
        yield []
        return
    for first in choices[0]:
        ranks = first.ranks if first else 1
        if ranks > 0 and world % ranks == 0:
            for rest in _products(choices[1:], world // ranks):
                yield [first, *rest] if first else rest


def _fixed(run: Run, name: str, strategy: Any) -> Alternative:
    return Alternative(name, {}, strategy, _axes(run, name, strategy), {})


def _axes(run: Run, name: str, strategy: Any) -> Axes:
    answers = hooks_of({name: strategy}).answers("build_mesh", run=run, world_size=run.world_size)
    return [axis for _, axes in answers for axis in axes]


def _alternatives(run: Run, name: str, strategy: Any) -> tuple[list[Alternative], str]:
    """All settings of a strategy's choices whose axes have an effect; and the last reason why one is impossible."""
    hooks = hooks_of({name: strategy})
    answers = hooks.answers("choices", run=run, world_size=run.world_size)
    choices: list[Choice] = [choice for _, answer in answers for choice in answer]
    made: list[tuple[dict[str, Any], Any, Axes]] = []
    why = ""
    for values in itertools.product(*(choice.values for choice in choices)):
        options = dict(zip([choice.option for choice in choices], values, strict=True))
        try:
            instance = plugins.create(name, options)
            axes = _axes(run, name, instance)
        except PlaitError as error:
            why = one_line(PlaitError(str(error)))  # without notes
            continue
        if any(_degree(axis) != 1 for axis in axes):
            made.append((options, instance, axes))
    sets = {c.option: axis for c in choices if (axis := _set(c.option, made)) is not None}
    return [Alternative(name, options, instance, axes, sets) for options, instance, axes in made], why


def _degree(axis: MeshAxis | MeshView) -> int:
    if isinstance(axis, MeshAxis):
        return axis.degree
    product = 1
    for own in axis.axes:
        product *= own.degree
    return product


def _set(option: str, made: list[tuple[dict[str, Any], Any, Axes]]) -> MeshAxis | None:
    """The axis whose degree `option` sets; None if it sets anything else, or more."""
    seen: dict[str, tuple[Any, list[MeshAxis]]] = {}
    found: MeshAxis | None = None
    for options, _, given in made:
        others = json.dumps({k: v for k, v in options.items() if k != option}, sort_keys=True, default=str)
        axes = [a for axis in given for a in ([axis] if isinstance(axis, MeshAxis) else axis.axes)]
        value, before = seen.setdefault(others, (options[option], axes))
        if len(axes) != len(before):
            return None
        for a, b in zip(axes, before, strict=True):
            if a == b:
                continue
            if attrs.evolve(a, degree=b.degree) != b or (a.degree, b.degree) != (options[option], value):
                return None
            if found is not None and found.name != a.name:
                return None
            found = a
    return found


def _composed(run: Run, picked: list[Alternative], fixed: set[str]) -> Composition | None:
    """The composition of `picked`; None if they cannot be combined."""
    instances = {a.name: a.instance for a in picked}
    try:
        roles = plugins.claimed(instances)
        turns = plugins.order(instances)
        places = [turn.name for turn in turns]
        by_name = {a.name: a for a in picked}
        layout = join_axes([(name, by_name[name].axes) for name in places], run.world_size)
    except PlaitError:
        return None
    if any(a.degree < 1 for axes in (layout.dense, *layout.views.values()) for a in axes):
        return None
    if layout.summed_axes() and "gradient_sum" not in roles:
        return None
    sharding = roles.get("parameter_sharding")
    cut = {a.name for a in layout.dense if a.splits == "layers" and a.degree > 1}
    divides = next((layout.owner[name] for name in cut), None)
    if divides is not None and (
        roles.get("stages") != divides or not hasattr(by_name[divides].instance, "plan_stages")
    ):
        return None
    alike = [(name, [a for a in by_name[name].axes if a.name not in cut]) for name in places]
    pieces = join_axes(alike, run.world_size // layout.count("layers"))
    strategies = {a.name: a.options for a in picked if a.name not in fixed}
    sets = {(a.name, option): axis for a in picked if a.name != divides for option, axis in a.sets.items()}
    inner = [axis.name for axis in sets.values() if axis.splits != "batch"]
    still = {a.name: a.degree for a in pieces.dense if a.splits != "batch"}
    still |= {a.name: a.degree for v, axes in pieces.views.items() for a in axes if not a.name.startswith(f"{v}.")}
    rest = {name: options for name, options in strategies.items() if name != divides}
    apart = {n: {k: v for k, v in options.items() if (n, k) not in sets} for n, options in rest.items()}
    same = [pieces.world_size, apart, {n: 0 if n in inner else d for n, d in still.items()}]
    kin = json.dumps(same, sort_keys=True, default=str)
    shards = [a.degree for a in by_name[sharding].axes if isinstance(a, MeshAxis)] if sharding else []
    family = json.dumps([apart, still, shards[-1:] == [1]], sort_keys=True, default=str)  # copies are outside of shards
    ordered = dict(sorted(strategies.items()))
    own = {n: d for n, d in still.items() if n in inner}
    core = {turn.name: strategies.get(turn.name) for turn in turns if turn.phase == "model"}
    return Composition(
        ordered, layout, pieces, divides, family, kin, own, json.dumps(core, sort_keys=True, default=str)
    )


def stage_plan(run: Run, composition: Composition, micro: int, model: nn.Module, spec: ModelSpec) -> StagePlan:
    """The plan of a step of `micro` micro-batches, from the strategy that divides the layers. Raises PlaitError if it
    refuses so many."""
    name = composition.divides
    assert name is not None
    strategy = run.strategies.get(name) or plugins.create(name, composition.strategies[name])
    asked = {"model": model, "spec": spec, "run": run, "micro": micro}
    found: StagePlan = hooks_of({name: strategy}).first("plan_stages", **asked)
    return found


def representatives(found: list[Composition]) -> dict[int, int]:
    """Index of each composition -> index of one of its family whose trace serves it: no axis has more than one rank
    unless it does in the other too."""
    large = [large_axes(c) for c in found]
    kept: list[int] = []
    serves: dict[int, int] = {}
    for i in sorted(range(len(found)), key=lambda i: (-len(large[i]), *_first(found[i]), found[i].text())):
        fits = [j for j in kept if found[j].family == found[i].family and large[i] <= large[j]]
        if not fits:
            kept.append(i)
            fits = [i]
        serves[i] = fits[0]
    return serves


def large_axes(composition: Composition) -> frozenset[str]:
    """Names of the axes that have more than one rank among the ranks with the same layers."""
    return frozenset(name for name, degree in degrees(composition.pieces).items() if degree > 1)


def _first(composition: Composition) -> tuple[Any, ...]:
    """A sort key that prefers whole models, and few copies and many shards, because searches mostly choose such
    layouts."""
    copies = tuple(a.degree for a in composition.layout.dense if a.splits == "batch")
    return composition.layout.count("layers"), copies
