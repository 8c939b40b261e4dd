"""Mesh axes as values, and how they are joined into one layout of the world: arithmetic only, no torch."""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from plait.contract.errors import PlaitError

# What an axis divides, from outermost to innermost: stages of layers communicate least, tensor ranks most.
SPLITS = ("layers", "batch", "sequence", None)


def _name(_: object, attribute: attrs.Attribute, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise TypeError(f"the {attribute.name} of a mesh axis or view must be text, not {value!r}")


def _whole(_: object, attribute: attrs.Attribute, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"the {attribute.name} of a mesh axis must be a whole number, not {value!r}")


def _all_axes(_: object, attribute: attrs.Attribute, value: tuple[object, ...]) -> None:
    if wrong := [item for item in value if not isinstance(item, MeshAxis)]:
        raise TypeError(f"the {attribute.name} of a mesh view must be of MeshAxis, not {wrong[0]!r}")


def _texts(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(items)


def _axes(items: "Iterable[MeshAxis]") -> "tuple[MeshAxis, ...]":
    return tuple(items)


@attrs.frozen
class MeshAxis:
    """A named dimension of the world.

    name:   unique in a run, for example `dp_shard`.
    degree: its size; -1 takes the ranks that the other axes leave.
    splits: what is divided along it: "layers", "batch", "sequence" or None (every rank sees the same tokens).
    shards: the logical axes of parameters that are divided along it, for example ("heads", "ffn", "vocab").
    sums:   whether gradients are summed along it, if it splits the batch or the sequence. Only such may say False;
            parameters may then differ between its ranks (local SGD), and a checkpoint holds each rank's if the strategy
            says by `replicas` what another number of ranks loads. Such an axis lies outside others with the same
            `splits`, and no view is carved out of it.
    """

    name: str = attrs.field(validator=_name)
    degree: int = attrs.field(default=-1, validator=_whole)
    splits: str | None = attrs.field(default=None, validator=attrs.validators.in_(SPLITS))
    shards: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    sums: bool = attrs.field(default=True)

    @sums.validator
    def _only_tokens(self, _: attrs.Attribute, value: bool) -> None:
        if not value and self.splits not in ("batch", "sequence"):
            raise ValueError(f"sums=False is for axes that split the batch or the sequence; {self.name!r} does not")

    @property
    def divides_values(self) -> bool:
        """Whether ranks along it may hold different values of one parameter; then no view mixes them."""
        return self.splits == "layers" or not self.sums


@attrs.frozen
class MeshView:
    """A second factoring of the same ranks, for some of the parameters: experts out of data and tensor ranks.

    name: unique in a run.
    axes: taken from the dense axes, from the innermost outward, never from layers or from an axis with sums=False.

    Each rank of a view works on tokens of its own. Dense ranks that see the same tokens, such as tensor ranks, each
    take a part of them.
    """

    name: str = attrs.field(validator=_name)
    axes: tuple[MeshAxis, ...] = attrs.field(converter=_axes, validator=_all_axes)


@attrs.frozen
class MeshLayout:
    """All axes of a run with their final degrees, outermost first.

    world_size: the number of ranks.
    dense: the product of the degrees is the world size.
    views: for every view its own axes, innermost, preceded by what they left of the dense axes; the remainder of axis
        `a` in view `v` is called `v.a`.
    owner: which strategy asked for an axis or a view.
    """

    world_size: int
    dense: tuple[MeshAxis, ...]
    views: Mapping[str, tuple[MeshAxis, ...]]
    owner: Mapping[str, str]

    def data_axes(self, view: str | None = None) -> tuple[MeshAxis, ...]:
        """The axes whose ranks hold the same parameters and see different tokens, so gradients are summed over them.

        In a view these are all axes that its own axes left over, tensor ranks included: every rank works on different
        tokens for a view's parameters.
        """
        if view is None:
            return tuple(a for a in self.dense if a.splits in ("batch", "sequence") and a.sums)
        return tuple(a for a in self.views[view] if a.name.startswith(f"{view}.") and not a.divides_values)

    def summed_axes(self) -> list[MeshAxis]:
        """The axes with several ranks over which gradients of some parameters are summed. If there are none, there is
        nothing to shard."""
        return [a for view in (None, *self.views) for a in self.data_axes(view) if a.degree > 1]

    def as_json(self) -> dict[str, Any]:
        """Plain values for the run's record."""

        def plain(axis: MeshAxis) -> dict[str, Any]:
            own = {key: getattr(axis, key) for key in ("name", "degree", "splits")}
            return {**own, "shards": list(axis.shards), "strategy": self.owner.get(axis.name)}

        views = {name: [plain(axis) for axis in axes] for name, axes in self.views.items()}
        return {"world_size": self.world_size, "dense": [plain(axis) for axis in self.dense], "views": views}

    def describe(self, axes: Iterable[MeshAxis]) -> str:
        """These axes in words: name, degree and strategy of each."""
        return describe(axes, self.owner)

    def count(self, splits: str | None) -> int:
        """Into how many parts the world divides "batch", "sequence" or "layers"; None: how many ranks see the same
        tokens."""
        return math.prod(a.degree for a in self.dense if a.splits == splits)


def valid_degree(_: object, attribute: attrs.Attribute, value: int) -> None:
    """A validator for options that are degrees: `shard: int = attrs.field(default=-1, validator=valid_degree)`."""
    if value != -1 and value < 1:
        raise ValueError(f"'{attribute.name}' must be at least 1, or -1 for what is left: {value}")


def divisors(number: int) -> list[int]:
    """The degrees that divide `number` ranks, in order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def join_axes(answers: Iterable[tuple[str, Iterable[MeshAxis | MeshView]]], world_size: int) -> MeshLayout:
    """Join the answers of all strategies, in their order, into one layout of `world_size` ranks.

    Raises PlaitError if they do not fit, naming every axis with its degree and strategy.
    """
    owner: dict[str, str] = {}
    axes: list[MeshAxis] = []
    views: list[MeshView] = []
    for strategy, answer in answers:
        for item in answer:
            for name in [item.name, *(a.name for a in getattr(item, "axes", ()))]:
                if name in owner:
                    sentence = f"mesh axis {name!r} is defined twice: by {owner[name]} and by {strategy}"
                    raise PlaitError(sentence).at(name, (owner[name], strategy))
                owner[name] = strategy
            if isinstance(item, MeshView):
                views.append(item)
            else:
                axes.append(item)
    axes.sort(key=lambda a: (SPLITS.index(a.splits), a.sums))  # stable: a strategy's own order is kept
    dense = _fill(axes, owner, world_size)
    return MeshLayout(world_size, dense, {v.name: _carve(v, dense, owner) for v in views}, owner)


def describe(axes: Iterable[MeshAxis], owner: Mapping[str, str]) -> str:
    return ", ".join(f"{a.name}={a.degree} ({owner.get(a.name, 'left over')})" for a in axes) or "none"


def _fill(axes: list[MeshAxis], owner: Mapping[str, str], world_size: int) -> tuple[MeshAxis, ...]:
    described = describe(axes, owner)
    for a in axes:
        if a.degree < 1 and a.degree != -1:
            raise PlaitError(
                f"the degree of axis {a.name!r} ({owner[a.name]}) is {a.degree}; it must be at least 1, "
                "or -1 for what is left"
            ).at(a.name, a.degree, fits="at least 1, or -1 for what is left")
    free = [a for a in axes if a.degree == -1]
    if len(free) > 1:
        raise PlaitError(
            f"only one axis may take what is left (-1), but {' and '.join(a.name for a in free)} both do; "
            f"axes: {described}"
        ).at(free[1].name, -1, "a degree of its own")
    known = math.prod(a.degree for a in axes if a.degree != -1)
    if free and world_size % known == 0:
        axes = [attrs.evolve(a, degree=world_size // known) if a.degree == -1 else a for a in axes]
    elif free or known != world_size:
        want = f"a multiple of {known}" if free else f"exactly {known}"
        raise PlaitError(
            f"the mesh does not fit {world_size} rank{'s' * (world_size != 1)}: it needs {want}; "
            + (
                f"axes: {described}"
                if axes
                else "no selected strategy has an axis: name one that has, as strategy=[NAME]"
            )
        ).at("world", world_size, fits=want)
    return tuple(axes)


def _carve(view: MeshView, dense: tuple[MeshAxis, ...], owner: Mapping[str, str]) -> tuple[MeshAxis, ...]:
    """The view's own axes, innermost, and before them what they leave of every dense axis.

    From the innermost dense axis outward, the view takes all of an axis, or the part that it still wants. Of
    dp_replicate 2 x dp_shard 2, a view `experts` of ep 2 makes experts.dp_replicate 2 x experts.dp_shard 1 x ep 2: ep's
    ranks are {0, 1} and {2, 3}, and an expert's gradient is summed over {0, 2} and {1, 3}.
    """
    open_axes = list(itertools.takewhile(lambda a: not a.divides_values or a.degree == 1, reversed(dense)))[::-1]
    ranks = math.prod(a.degree for a in open_axes)
    fixed = math.prod(a.degree for a in view.axes if a.degree != -1)
    own = [attrs.evolve(a, degree=max(ranks // fixed, 1)) if a.degree == -1 else a for a in view.axes]
    want = math.prod(a.degree for a in own)
    rest: list[MeshAxis] = []
    for axis in reversed(dense):
        taken = 1 if axis.divides_values else math.gcd(want, axis.degree)
        if taken not in (want, axis.degree):
            break
        want //= taken
        rest.insert(0, attrs.evolve(axis, name=f"{view.name}.{axis.name}", degree=axis.degree // taken, shards=()))
    if want != 1 or len(rest) != len(dense):
        fits = sorted(_fitting([a.degree for a in open_axes]))
        others = f"the axes {describe(dense, owner)}, which cannot be divided that way" if dense else "other strategies"
        more = "" if dense else "; no selected strategy has an axis: add one that divides the batch"
        raise PlaitError(
            f"{describe(own, owner)} asks for {math.prod(a.degree for a in own)} of the ranks of {others}; "
            f"degrees that fit: {', '.join(map(str, fits))}{more}"
        ).at(own[0].name, own[0].degree, fits=fits)
    return (*rest, *own)


def _fitting(degrees: list[int]) -> set[int]:
    inner, fits = 1, {1}
    for degree in reversed(degrees):
        fits |= {inner * d for d in range(1, degree + 1) if degree % d == 0}
        inner *= degree
    return fits
