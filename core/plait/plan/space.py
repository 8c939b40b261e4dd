"""Every way to compose the strategies that offer choices: those whose meshes fit the world."""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from plait.contract.axes import Layout, MeshAxis, MeshView, assemble
from plait.contract.choices import Choice
from plait.contract.errors import PlaitError, one_line
from plait.contract.run import Run
from plait.parallel.answers import ANSWERS
from plait.strategies.hooks import Braid
from plait.strategies.order import claimed, order
from plait.strategies.registry import create, installed, load

Axes = list[MeshAxis | MeshView]


@attrs.frozen
class Alternative:
    """One way to set a strategy's choices. scales: those of them that only say how many ranks an axis has that splits
    the batch."""

    name: str
    options: dict[str, Any]
    instance: Any
    axes: Axes
    scales: tuple[str, ...]

    @property
    def ranks(self) -> int:
        product = 1
        for axis in self.axes:
            product *= axis.degree if isinstance(axis, MeshAxis) else 1
        return product


@attrs.frozen
class Composition:
    """Strategies with their options, in order of their names, and their mesh.

    family: equal for compositions that differ in nothing but the degrees of axes that split the batch.
    """

    strategies: dict[str, dict[str, Any]]
    layout: Layout
    family: str

    def text(self) -> str:
        return json.dumps(self.strategies, sort_keys=True)


def offering(run: Run) -> dict[str, Any]:
    """Name -> instance of each installed strategy that offers choices, if it can be used in this run."""
    found = {}
    for name, plugin in installed().items():
        if plugin.state == "ok" and name not in run.strategies and hasattr(load(name), "choices"):
            found[name] = create(name, {})
    return found


def compositions(run: Run, offered: Mapping[str, Any]) -> tuple[list[Composition], dict[str, str]]:
    """(all that fit the run's world, strategy -> why it cannot take part), for strategies `offered` by name.

    Strategies that the run has selected already take part in each, as they are.
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
    """One alternative or none of each strategy, with as many ranks together as divide the world."""
    if not choices:
        yield []
        return
    for first in choices[0]:
        ranks = first.ranks if first else 1
        if ranks > 0 and world % ranks == 0:
            for rest in _products(choices[1:], world // ranks):
                yield [first, *rest] if first else rest


def _fixed(run: Run, name: str, strategy: Any) -> Alternative:
    return Alternative(name, {}, strategy, _axes(run, name, strategy), ())


def _axes(run: Run, name: str, strategy: Any) -> Axes:
    answers = Braid({name: strategy}, ANSWERS).answers("build_mesh", run=run, world_size=run.world_size)
    return [axis for _, axes in answers for axis in axes]


def _alternatives(run: Run, name: str, strategy: Any) -> tuple[list[Alternative], str]:
    """All settings of a strategy's choices whose axes do something; and the last reason why one could not be."""
    braid = Braid({name: strategy}, ANSWERS)
    answers = braid.answers("choices", run=run, world_size=run.world_size)
    choices: list[Choice] = [choice for _, answer in answers for choice in answer]
    made: list[tuple[dict[str, Any], Any, Axes]] = []
    why = ""
    for values in itertools.product(*(choice.values for choice in choices)):
        options = dict(zip([choice.option for choice in choices], values, strict=True))
        try:
            instance = create(name, options)
            axes = _axes(run, name, instance)
        except PlaitError as error:
            why = one_line(error)
            continue
        if any(_degree(axis) != 1 for axis in axes):
            made.append((options, instance, axes))
    scales = tuple(c.option for c in choices if _scales(c.option, made))
    return [Alternative(name, options, instance, axes, scales) for options, instance, axes in made], why


def _degree(axis: MeshAxis | MeshView) -> int:
    if isinstance(axis, MeshAxis):
        return axis.degree
    product = 1
    for own in axis.axes:
        product *= own.degree
    return product


def _scales(option: str, made: list[tuple[dict[str, Any], Any, Axes]]) -> bool:
    """Whether `option` is the degree of an axis that splits the batch, and nothing else."""

    def others(options: Mapping[str, Any]) -> str:
        return json.dumps({k: v for k, v in options.items() if k != option}, sort_keys=True, default=str)

    seen: dict[str, tuple[Any, Axes]] = {}
    for options, _, axes in made:
        value, before = seen.setdefault(others(options), (options[option], axes))
        if len(axes) != len(before):
            return False
        for a, b in zip(axes, before, strict=True):
            if a == b:
                continue
            if not isinstance(a, MeshAxis) or not isinstance(b, MeshAxis) or a.splits != "batch":
                return False
            if attrs.evolve(a, degree=b.degree) != b or (a.degree, b.degree) != (options[option], value):
                return False
    return any(type(options[option]) is int for options, _, _ in made)


def _composed(run: Run, picked: list[Alternative], fixed: set[str]) -> Composition | None:
    """None if these do not go together."""
    instances = {a.name: a.instance for a in picked}
    try:
        roles = claimed(instances)
        places = [p.name for p in order(instances)]
        by_name = {a.name: a for a in picked}
        layout = assemble([(name, by_name[name].axes) for name in places], run.world_size)
    except PlaitError:
        return None
    if any(a.degree < 1 for axes in (layout.dense, *layout.views.values()) for a in axes):
        return None
    shared = any(a.degree > 1 for view in (None, *layout.views) for a in layout.data_axes(view))
    if shared and "gradient_sum" not in roles:
        return None
    if any(a.splits == "layers" and a.degree > 1 for a in layout.dense):
        return None
    strategies = {a.name: a.options for a in picked if a.name not in fixed}
    apart = {a.name: {k: v for k, v in a.options.items() if k not in a.scales} for a in picked if a.name not in fixed}
    still = [(a.name, a.degree) for a in layout.dense if a.splits != "batch"]
    still += [(a.name, a.degree) for v, axes in layout.views.items() for a in axes if not a.name.startswith(f"{v}.")]
    family = json.dumps([apart, still], sort_keys=True, default=str)
    return Composition(dict(sorted(strategies.items())), layout, family)


def representatives(found: list[Composition]) -> dict[int, int]:
    """Place of each composition -> place of one of its family whose trace serves it: no axis is larger than one that
    is not so in the other."""
    large = [_large(c) for c in found]
    kept: list[int] = []
    serves: dict[int, int] = {}
    for i in sorted(range(len(found)), key=lambda i: (-len(large[i]), _unevenness(found[i]), found[i].text())):
        fits = [j for j in kept if found[j].family == found[i].family and large[i] <= large[j]]
        if not fits:
            kept.append(i)
            fits = [i]
        serves[i] = fits[0]
    return serves


def _large(composition: Composition) -> frozenset[str]:
    layout = composition.layout
    return frozenset(a.name for axes in (layout.dense, *layout.views.values()) for a in axes if a.degree > 1)


def _unevenness(composition: Composition) -> int:
    """Few copies and many shards: what is most like what is chosen in the end."""
    return sum(a.degree * 2**i for i, a in enumerate(reversed(composition.layout.dense)) if a.splits == "batch")
