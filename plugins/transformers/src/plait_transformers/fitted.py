"""What was derived from the small copy of a model, for the model itself: how many heads it has, by their widths."""

from collections.abc import Iterable, Mapping

import attrs
from torch import Tensor

from plait import PlaitError, UnequalParts
from plait_transformers.facts import ModelFacts
from plait_transformers.supposed import MIXER, Axis, name_of


def sizes_of(facts: ModelFacts, named: Mapping[str, Tensor], kind: str) -> dict[str, int]:
    """Axis -> its units in the model of the parameters `named`. Raises PlaitError if its layers differ in heads."""
    counts = {axis: _counted(facts, named, axis) for axis in ("heads", "kv_heads", MIXER)}
    if any(its is not None and len(its) != 1 for its in counts.values()):
        raise PlaitError(f"model=transformers cannot train a {kind} whose layers differ in heads")
    sizes = {axis: min(its) for axis, its in counts.items() if its}
    for axis, size in _joined(facts, named, {"heads", "kv_heads"}):  # what queries leave of its rows
        wide = {name: sum(n for each, n in axis.parts if each == name) for name in ("heads", "kv_heads")}
        sizes.setdefault("kv_heads", (size - sizes["heads"] * wide["heads"]) // wide["kv_heads"])
    return sizes


def fitted(facts: ModelFacts, named: Mapping[str, Tensor]) -> ModelFacts:
    """`facts`, in which mixers stay whole if their heads are not as wide in the model as in its small copy."""
    counts = _counted(facts, named, MIXER)
    if counts is None or len(counts) == 1:
        return facts
    mixing = {m for m in facts.mixers if any(f.startswith(f"{m}.") and _is_of_mixer(a) for f, a in facts.roles.items())}
    why = "its heads are not as wide as in the small copy of the model, or not equally wide in all layers"
    return attrs.evolve(
        facts,
        roles={fqn: tuple(None if _is_of_mixer([a]) else a for a in axes) for fqn, axes in facts.roles.items()},
        whole={**facts.whole, **dict.fromkeys(sorted(mixing), why)},
        across={fqn: axis for fqn, axis in facts.across.items() if axis != MIXER},
        elementwise=tuple(fqn for fqn in facts.elementwise if not _is_of_mixer(facts.roles[fqn])),
    )


def _is_of_mixer(axes: Iterable[Axis]) -> bool:
    return any(name_of(a) == MIXER or (isinstance(a, UnequalParts) and MIXER in dict(a.parts)) for a in axes)


def _counted(facts: ModelFacts, named: Mapping[str, Tensor], wanted: str) -> set[int] | None:
    """How many units of an axis there may be, in the opinion of all parameters that have it; None: none has."""
    found: set[int] | None = None
    for fqn, param in named.items():
        pattern = facts.pattern(fqn)
        for axis, size in zip(facts.roles.get(pattern, ()), param.shape, strict=False):
            if name_of(axis) == wanted and pattern not in facts.queries:
                its = {size // width for width in facts.widths[pattern] if size % width == 0}
                found = its if found is None else found & its
    if wanted == MIXER:
        for axis, size in _joined(facts, named, {MIXER}):
            rows = sum(n for name, n in axis.parts if name)
            left = size - sum(n for name, n in axis.parts if name is None)
            its = {left // rows} if left % rows == 0 else set()
            found = its if found is None else found & its
    return found


def _joined(facts: ModelFacts, named: Mapping[str, Tensor], names: set[str]) -> Iterable[tuple[UnequalParts, int]]:
    """(parts, rows) of each dim that joins parts of unequal size of the axes `names`."""
    for fqn, param in named.items():
        for axis, size in zip(facts.roles.get(facts.pattern(fqn), ()), param.shape, strict=False):
            q = facts.queries.get(facts.pattern(fqn))
            if q is not None and not isinstance(axis, UnequalParts):
                axis = UnequalParts((("heads", q), ("kv_heads", q), ("kv_heads", q)))
            if isinstance(axis, UnequalParts) and names & {*dict(axis.parts)}:
                yield axis, size
