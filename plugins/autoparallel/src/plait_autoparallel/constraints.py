"""What the user requires of a plan: fixed axes, required or forbidden choices, the samples of a step."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from plait import REMAT, MeshLayout, ModelSpec, PlaitError, matches, near_miss, planning
from plait_autoparallel.solve import Segment

KEY = "strategy.autoparallel"


class Infeasible(PlaitError):
    """No layout satisfies the constraints within the memory; another value of one of them might help."""


@attrs.frozen
class Constraints:
    """axes: name -> degree. require, forbid: pattern -> names of axes or modes of recomputation. spec: the model's.

    samples: of a step, over all ranks. shapes: of the parameters. mode: `remat.mode`, which decides if it is not none.
    together: rows that the loss compares, such as 2 of pairs, which no micro-batch parts.
    """

    axes: Mapping[str, int]
    require: Mapping[str, tuple[str, ...]]
    forbid: Mapping[str, tuple[str, ...]]
    spec: ModelSpec
    shapes: Mapping[str, Any]
    samples: int
    mode: str = "none"
    together: int = 1

    def axes_fit(self, found: list[Any], world: int, reasons: Mapping[str, str]) -> list[Any]:
        """Those with the required degrees. Raises PlaitError if an axis does not exist, or cannot have such a
        degree."""
        offered: dict[str, set[int]] = {}
        for composition in found:
            for name, degree in planning.degrees(composition.layout).items():
                offered.setdefault(name, {1}).add(degree)
        for name, degree in self.axes.items():
            if name not in offered:
                known = sorted(n for n in offered if "." not in n)
                why = "; ".join(f"{n} cannot take part: {w}" for n, w in reasons.items())
                raise PlaitError(
                    f"{KEY}.axes names {name!r}, but no layout of {world} ranks has that axis; available: "
                    f"{', '.join(known) or 'none'}{near_miss(name, known)}{f' ({why})' if why else ''}"
                ).at(f"{KEY}.axes", name, fits=known)
            if degree not in offered[name]:
                raise PlaitError(
                    f"{KEY}.axes.{name}={degree} fits no layout of {world} ranks; {name} can be "
                    f"{', '.join(map(str, sorted(offered[name])))}"
                ).at(f"{KEY}.axes.{name}", degree, fits=sorted(offered[name]))
        fits = [c for c in found if all(planning.degrees(c.layout).get(n, 1) == d for n, d in self.axes.items())]
        if found and not fits:
            asked = ", ".join(f"{n}={d}" for n, d in self.axes.items())
            raise Infeasible(
                f"{KEY}.axes asks for {asked}, which do not go together on {world} ranks; leave one out"
            ).at(f"{KEY}.axes", asked)
        return fits

    def placed(self, pieces: planning.Pieces, layout: Any) -> bool:
        """Whether parameters are divided in `layout` as required."""
        now = planning.degrees(layout)
        for wanted, holds in ((self.require, True), (self.forbid, False)):
            for pattern, names in wanted.items():
                axes = [n for n in names if n not in REMAT]
                for dims in self._matching(pattern, pieces) if axes else ():
                    divided = {a for each in dims for a in each if now.get(a, 1) > 1}
                    if any((axis in _plain(divided)) != holds for axis in axes):
                        return False
        return True

    def _matching(self, pattern: str, pieces: planning.Pieces) -> list[tuple[tuple[str, ...], ...]]:
        """The axes that divide each dim of the parameters that match `pattern`; for a logical axis only its dims."""
        tensors = []
        for fqn, tensor in pieces.tensors.items():
            if matches(pattern, fqn):
                tensors.append(tensor.divided)
            elif pattern in (logical := self.spec.names_of(fqn)):
                tensors.append(tuple(d for d, name in zip(tensor.divided, logical, strict=True) if name == pattern))
        return tensors

    def segments(self, pieces: planning.Pieces) -> list[Segment]:
        """Neighbouring blocks of one kind that may recompute in the same modes."""
        kind_of = {fqn: i for i, g in enumerate(pieces.groups) for fqn in g.fqns}
        blocks = sorted(kind_of, key=_numbers)
        segments: list[Segment] = []
        for block in blocks:
            ways = self._ways(block)
            if segments and segments[-1].kind == kind_of[block] and segments[-1].ways == ways:
                segments[-1] = attrs.evolve(segments[-1], blocks=(*segments[-1].blocks, block))
            else:
                segments.append(Segment((block,), kind_of[block], ways))
        return segments

    def batches(self, layout: MeshLayout) -> list[tuple[int, int]]:
        """(samples at once, times) for a rank's part of the step's samples."""
        own, together = self.samples // layout.count("batch"), self.together
        return [(rows, own // rows) for rows in range(own, 0, -1) if own % rows == 0 and rows % together == 0]

    def shared_by(self, layout: MeshLayout) -> bool:
        """Whether all data ranks get the same number of samples, and no group of the loss is parted."""
        return self.samples % (layout.count("batch") * self.together) == 0

    def may_keep_all(self, blocks: Iterable[str]) -> bool:
        """Whether a plan may recompute nothing."""
        return all("none" in self._ways(block) for block in blocks)

    def _ways(self, block: str) -> tuple[str, ...]:
        ways = list(REMAT) if self.mode == "none" else [self.mode]
        for pattern, names in self.require.items():
            modes = [n for n in names if n in REMAT]
            if modes and matches(pattern, block):
                ways = [w for w in ways if w in modes]
        for pattern, names in self.forbid.items():
            if matches(pattern, block):
                ways = [w for w in ways if w not in names]
        if not ways:
            raise PlaitError(f"{KEY}.require and forbid leave block {block!r} no mode of recomputation; relax one").at(
                f"{KEY}.require", block
            )
        return tuple(ways)

    def check(self, blocks: list[str], axes: set[str]) -> None:
        """Raises PlaitError for a pattern that matches nothing, or a choice that does not exist."""
        logical = sorted({a for fqn in self.shapes for a in self.spec.names_of(fqn) if a})
        for key, wanted in (("require", self.require), ("forbid", self.forbid)):
            for pattern, names in wanted.items():
                parameters = pattern in logical or any(matches(pattern, f) for f in self.shapes)
                if not parameters and not any(matches(pattern, b) for b in blocks):
                    near = near_miss(pattern, [*logical, *self.shapes, *blocks])
                    raise PlaitError(
                        f"{KEY}.{key} names {pattern!r}, which is neither a logical axis ({', '.join(logical)}), nor "
                        f"the pattern of a parameter or block{near}"
                    ).at(f"{KEY}.{key}", pattern, fits=logical)
                for name in names:
                    known = sorted(axes) if parameters else list(REMAT)
                    if name not in known:
                        raise PlaitError(
                            f"{KEY}.{key}.{pattern}={name} is not a choice there; available: {', '.join(known)}"
                            f"{near_miss(name, known)}"
                        ).at(f"{KEY}.{key}.{pattern}", name, fits=known)
        for pattern, names in self.require.items():
            if both := [n for n in names if n in self.forbid.get(pattern, ())]:
                raise PlaitError(f"{KEY}.require and forbid both name {pattern}={both[0]}; leave one out").at(
                    f"{KEY}.require.{pattern}", both[0]
                )
        for block in blocks:
            self._ways(block)

    def each_left_out(self) -> "Iterator[tuple[str, Constraints]]":
        """(the key and value of one constraint, all others), for each."""
        for name in ("axes", "require", "forbid"):
            given = getattr(self, name)
            for key, value in given.items():
                written = value if isinstance(value, int) else value[0] if len(value) == 1 else f"[{','.join(value)}]"
                others: dict[str, Any] = {name: {k: v for k, v in given.items() if k != key}}
                yield f"{KEY}.{name}.{key}={written}", attrs.evolve(self, **others)
        if self.mode != "none":
            yield f"remat.mode={self.mode}", attrs.evolve(self, mode="none")

    def nothing(self, found: list[Any], samples: int, reasons: Mapping[str, str]) -> PlaitError:
        """Why no layout is left."""
        if not found:
            why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            return PlaitError(
                f"no composition of the strategies that may be used ({KEY}.strategies; null: all that are installed) "
                f"fits the run's ranks{f': {why}' if why else ''}"
            ).at(f"{KEY}.strategies")
        shares = sorted({c.layout.count("batch") for c in found})
        if not any(self.shared_by(c.layout) for c in found):
            each = shares[0] * self.together
            fits = each * max(samples // each, 1)
            together = f", and the loss takes {self.together} together" if self.together > 1 else ""
            return PlaitError(
                f"a step's {samples} samples (train.global_batch_size) fit no layout, whose numbers of data ranks "
                f"are {', '.join(map(str, shares))}{together}; {fits} would fit"
            ).at("train.global_batch_size", samples, fits=(fits,))
        asked = {key: value for key, value in (("require", self.require), ("forbid", self.forbid)) if value}
        asked_for = " and ".join(f"{key} {_written(value)}" for key, value in asked.items())
        (key, value), *_ = asked.items()
        return Infeasible(f"no layout satisfies {KEY}.{asked_for}; relax one of them").at(f"{KEY}.{key}", dict(value))

    def too_little(self, short: Any, capacity: float) -> PlaitError:
        """How much memory the layout with the smallest need requires."""
        from plait_autoparallel.words import described, size

        return Infeasible(
            f"no plan fits {size(capacity)} per rank ({KEY}.memory, or the cluster's): the one that needs least, "
            f"{described(short.candidate)}, needs {size(short.needs)}, {size(short.needs - capacity)} more; take more "
            "ranks, a shorter train.seq_len, precision.param=bfloat16 or more memory"
        ).at(f"{KEY}.memory", capacity, fits=f"at least {short.needs:.0f} bytes")


def _plain(names: set[str]) -> set[str]:
    """Also lists what a view left over of an axis under the axis' own name."""
    return names | {n.rpartition(".")[2] for n in names}


def _numbers(fqn: str) -> tuple[tuple[int, Any], ...]:
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in fqn.split("."))


def _written(wanted: Mapping[str, tuple[str, ...]]) -> str:
    """As in a config."""
    lists = (f"{pattern}: [{', '.join(names)}]" for pattern, names in wanted.items())
    return f"{{{', '.join(lists)}}}"
