"""How a mixer may be divided: by which of its rows reach which columns of the matrix that writes to the stream.

A mixer has heads, or channels, that are computed without each other. Which rows of a fused matrix, channels of a
convolution or elements of a vector belong to which of them is not guessed: the gradient of a few columns is zero for
the rows of all other heads. Rows that reach all columns, such as those of B and C that all heads of a Mamba 2 share,
stay whole. `branch` tries the result.
"""

import copy
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plait import Packed, UnequalParts
from plait_transformers.counts import Counts, numbers_of
from plait_transformers.matrices import is_matrix, widths_of
from plait_transformers.shrink import HEADS
from plait_transformers.supposed import MIXER, Axes, Axis, Division
from plait_transformers.watch import Call, Watch

SHARED = -1  # of a row that reaches all heads
DEPENDENT = "what one of its heads or channels computes changes what the others do"
Parts = list[tuple[str | None, int]]  # as in UnequalParts


class StaysWhole(Exception):
    """Says why a mixer cannot be divided."""


def of_mixer(
    fqn: str, branch: nn.Module, call: Call, readers: Collection[str], writer: str, watch: Watch
) -> Iterator[Division]:
    """How the mixer `fqn`, whose result the matrix `writer` writes, may be divided. Raises StaysWhole if no rows are of
    one head, or a buffer has values for each.

    call: of the mixer, as seen in `watch`. readers: matrices that read the stream.
    """
    own = writer.removeprefix(f"{fqn}.")
    inner = watch.calls[writer].widths()[0]
    over, tried = _norms(fqn, branch, inner, watch), False
    for alone in ((), over) if over else ((),):
        reached = _Reached(branch, call, own, alone)
        found = ((units, reached.all_parts(units)) for units in _units(branch, inner))
        units, parts = next(((n, each) for n, each in found if each is not None), (0, {}))
        of = _follows(branch, parts, fqn, watch)
        if (
            not units
            or of is None
            or any(not parts[name][1] for name in _reading_all(fqn, branch, {*readers, writer}, inner))
        ):
            continue
        if buffer := reached.divided_buffer(parts):
            raise StaysWhole(f"its buffer {buffer!r} has values for each head, and buffers are not divided")
        parts = {name: each for name, each in parts.items() if not any(name.startswith(f"{norm}.") for norm in alone)}
        axes, vectors = _axes(fqn, branch, own, parts)
        for counted in _counting(fqn, branch, parts, units, of, alone):
            tried = True
            yield Division(axes, {f"{fqn}.{norm}": MIXER for norm in alone}, vectors, counted, units=units)
    if not tried:
        raise StaysWhole(DEPENDENT)


def _norms(fqn: str, branch: nn.Module, inner: int, watch: Watch) -> list[str]:
    """Modules that may norm over all heads: with a vector as long as all of them, and called once with as much."""
    found = list[str]()
    for name, module in branch.named_modules():
        full, own = f"{fqn}.{name}", [*module.parameters(recurse=False)]
        if own and not is_matrix(module) and len(watch.places.get(full, ())) == 1:
            entered = watch.calls[full].entered
            wide = entered is not None and entered.shape[-1] == inner
            if wide and {tuple(p.shape) for p in own} == {(inner,)}:
                found.append(name)
    return found


def _units(branch: nn.Module, inner: int) -> list[int]:
    """How many heads or channels there may be, the most first."""
    lengths = {p.shape[0] for p in branch.parameters() if p.dim() == 1} | {inner, HEADS}
    halves = {n >> by for n in lengths for by in range(4)}
    return sorted((n for n in halves if n > 1 and inner % n == 0), reverse=True)


def _reading_all(fqn: str, branch: nn.Module, ends: Collection[str], inner: int) -> Iterator[str]:
    """The weights of matrices between the `ends` that read all heads, or channels."""
    for name, module in branch.named_modules():
        if is_matrix(module) and f"{fqn}.{name}" not in ends and widths_of(module)[0] == inner != widths_of(module)[1]:
            yield f"{name}.weight"


class _Reached:
    """Which rows of the parameters of a mixer reach which columns of the matrix that writes its result."""

    def __init__(self, branch: nn.Module, call: Call, writer: str, alone: Collection[str]) -> None:
        part, seen = copy.deepcopy(branch).double(), list[Tensor]()  # a buffer may be of float32
        named = [(n, x) for n, x in (*part.named_parameters(), *part.named_buffers()) if x.is_floating_point()]
        for _, value in named:
            value.requires_grad_(True)
        part.get_submodule(writer).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        for name in alone:
            part.get_submodule(name).register_forward_hook(_each_alone)
        with torch.enable_grad():
            part(*call.args, **call.kwargs)
        self._writer, self._buffers = writer, {name for name, _ in part.named_buffers()}
        self._names, self._params = zip(*named, strict=True)
        generator = torch.Generator().manual_seed(2)
        self._seen = seen[0]
        self._weights = torch.randn(self._seen.shape, generator=generator, dtype=self._seen.dtype)
        self._bits: dict[int, list[list[Any]]] = {}

    def all_parts(self, units: int) -> dict[str, tuple[int, Parts]] | None:
        """Parameter, or buffer -> (dim, what lies along it). None: some rows are of several `units`, and not of all."""
        found = {n: self._parts(n, units) for n in self._names if not n.startswith(f"{self._writer}.")}
        known = {name: each for name, each in found.items() if each is not None}
        return known if len(known) == len(found) and any(parts for _, parts in known.values()) else None

    def divided_buffer(self, parts: Mapping[str, tuple[int, Parts]]) -> str:
        """The name of a buffer that has parts; "" if none has."""
        return next((name for name, (_, its) in parts.items() if name in self._buffers and its), "")

    def _parts(self, name: str, units: int) -> tuple[int, Parts] | None:
        """(dim, what lies along it) of the parameter `name`; no parts if all of it reaches all of `units`. None: it has
        rows that reach some of them only, or in no order that parts have."""
        at, shape = self._names.index(name), self._params[self._names.index(name)].shape
        for dim in range(len(shape)):
            sides = [[_along(each[at], dim, shape) for each in both] for both in self._both(units)]
            unit, decided = torch.zeros(shape[dim], dtype=torch.int64), list[Tensor]()
            for bit, (low, high) in enumerate(sides):
                unit += (high & ~low).long() << bit
                decided.append(high ^ low)
            known, none = torch.stack(decided).all(0), ~torch.stack(decided).any(0)
            if bool(none.all()):
                continue
            if not bool((known | none).all()):
                return None
            labels = torch.where(none, SHARED, unit).tolist()
            found = _parts(labels, units)
            return None if found is None else (dim, found)
        return 0, []

    def _both(self, units: int) -> list[list[Any]]:
        """Of each bit of a unit's number: the gradients of the columns of all units without it, and with it."""
        if units not in self._bits:
            width = self._seen.shape[-1]
            number = torch.arange(width) // (width // units)
            self._bits[units] = [
                [self._gradients((number >> bit & 1) == side) for side in range(2)]
                for bit in range((units - 1).bit_length())
            ]
        return self._bits[units]

    def _gradients(self, columns: Tensor) -> Any:
        with torch.enable_grad():
            total = (self._seen * self._weights)[..., columns].sum()
        return torch.autograd.grad(total, self._params, retain_graph=True, allow_unused=True)


def _along(gradient: Tensor | None, dim: int, shape: Any) -> Tensor:
    """Which rows along `dim` have a gradient."""
    if gradient is None:
        return torch.zeros(shape[dim], dtype=torch.bool)
    return (gradient != 0).movedim(dim, 0).flatten(1).any(1) if gradient.dim() > 1 else gradient != 0


def _each_alone(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    """In place of what a norm over all heads makes of them: something in which each element stays alone."""
    for value in (*args, *module.parameters(recurse=False)):
        if isinstance(value, Tensor) and value.shape[-1] == result.shape[-1]:
            result = value if value is args[0] else result * value
    return result


def _parts(labels: list[int], units: int) -> Parts | None:
    """The parts that lie along a dim whose rows have the numbers `labels` of heads; None if they have no such order."""
    runs = [(label, len([*rows])) for label, rows in itertools.groupby(labels)]
    found: Parts = []
    while runs:
        label, rows = runs[0]
        if label == SHARED:
            found.append((None, rows))
            runs = runs[1:]
        elif runs[:units] == [(unit, rows) for unit in range(units)]:
            found.append((MIXER, rows))
            runs = runs[units:]
        else:
            return None
    return found


def _axis(parts: Parts) -> Axis:
    if {*parts} == {parts[0]} and parts[0][0] is not None:
        return Packed(MIXER, len(parts)) if len(parts) > 1 else MIXER
    return UnequalParts(tuple(parts))


def _axes(
    fqn: str, branch: nn.Module, writer: str, known: Mapping[str, tuple[int, Parts]]
) -> tuple[Axes, tuple[str, ...]]:
    """(axes of all parameters, those whose elements act on their own head alone)."""
    axes, vectors = Axes(), []
    hidden = widths_of(branch.get_submodule(writer))[1]
    for name, parameter in branch.named_parameters():
        owner = name.rpartition(".")[0]
        module = branch.get_submodule(owner)
        its: list[Axis] = [None] * parameter.dim()
        dim, parts = known.get(name, (0, []))
        if parts:
            its[dim] = _axis(parts)
            if parameter.dim() == 1:
                vectors.append(f"{fqn}.{name}")
        if isinstance(module, nn.Linear) and owner == writer:
            its = list[Axis](["embed", MIXER][: parameter.dim()])
        elif is_matrix(module) and isinstance(module, nn.Linear) and parameter.dim() == 2:
            its[1] = its[1] or ("embed" if parameter.shape[1] == hidden else None)
        axes[f"{fqn}.{name}"] = tuple(its)
    return axes, tuple(vectors)


def _follows(
    branch: nn.Module, known: Mapping[str, tuple[int, Parts]], fqn: str, watch: Watch
) -> tuple[str, int] | None:
    """(the first matrix with rows of heads, how many of them every rank needs)."""
    found = [
        (watch.places[f"{fqn}.{name}"][0], f"{fqn}.{name}", sum(rows for axis, rows in parts if axis is None))
        for name, module in branch.named_modules()
        if isinstance(module, nn.Linear) and f"{fqn}.{name}" in watch.places
        for dim, parts in [known.get(f"{name}.weight", (1, []))]
        if parts and dim == 0
    ]
    return min(found)[1:] if found else None


def _counting(
    fqn: str,
    branch: nn.Module,
    known: Mapping[str, tuple[int, Parts]],
    units: int,
    of: tuple[str, int],
    but: Collection[str],
) -> Iterator[Counts]:
    """Which attributes may count heads: all that have a number that rows of several heads have, without those whose
    names say otherwise; or without one of them. but: modules that get all heads."""
    sums: dict[int, int] = {units: 0}  # rows of neighbouring parts -> how many of them every rank needs
    for _, parts in known.values():
        for start, end in itertools.combinations(range(len(parts) + 1), 2):
            some = parts[start:end]
            if any(axis for axis, _ in some):
                total = sum(rows * (units if axis else 1) for axis, rows in some)
                sums.setdefault(total, sum(rows for axis, rows in some if axis is None))
    found = Counts()
    for name, module in branch.named_modules():
        if not is_matrix(module) and name not in but:
            for attribute, value in numbers_of(module):
                if value in sums:
                    found.setdefault(f"{fqn}.{name}".strip("."), {})[attribute] = (*of, sums[value])
    yield found
    for module, attributes in found.items():
        for left_out in attributes:
            rest = {name: each for name, each in attributes.items() if name != left_out}
            yield {**found, module: rest}
