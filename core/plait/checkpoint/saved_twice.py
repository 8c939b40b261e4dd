"""A tied parameter that files hold under two names: both must have the same values, or one would be lost."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from safetensors import safe_open

from plait.checkpoint.filled import fill
from plait.checkpoint.weight_files import Files
from plait.contract.errors import PlaitError
from plait.contract.weight_part import WeightPart

if TYPE_CHECKING:  # the parent checks names and shapes without torch
    from torch import Tensor

ELEMENTS = 1 << 24  # that are compared at a time
KEY = "checkpoint.init_from"
UNTIE = "tie_embeddings=false, or tie_word_embeddings=false in a config.json"


def untied(name: str, other: str, what: object) -> PlaitError:
    """The error for two names of one parameter whose values differ."""
    return PlaitError(
        f"{name!r} and {other!r} differ in {what}, but the model ties them: untie them in the model's config "
        f"({UNTIE}), or remove the one that is wrong"
    )


def check_same(
    files: Files, first: Mapping[str, WeightPart], second: Mapping[str, WeightPart], shape: Sequence[int]
) -> None:
    """Raises PlaitError if the values of the parameter under its second names differ. Reads a few rows at a time."""
    names = list(first), list(second)
    if len(first) == len(second) == 1 and first[names[0][0]].dims == second[names[1][0]].dims:
        pieces = _rows(files, names[0][0], names[1][0])
    else:  # rare: the files divide it, and differently under each name
        pieces = iter([(_whole(files, first, shape), _whole(files, second, shape))])
    if not all(alike(one, other) for one, other in pieces):
        raise untied(names[0][0], names[1][0], files.path).at(KEY, str(files.path), fits=UNTIE)


def check_as_read(
    files: Files, first: Mapping[str, WeightPart], second: Mapping[str, WeightPart], tensor: "Tensor"
) -> None:
    """As `check_same`, but compares `tensor`, filled from the first names: this rank's part alone, in its dtype."""
    import torch
    from torch.distributed.tensor import DTensor

    again = torch.empty_like(tensor)
    _fill(files, second, again)
    pair = [each.to_local() if isinstance(each, DTensor) else each for each in (tensor.detach(), again)]
    if not alike(*pair):
        raise untied(next(iter(first)), next(iter(second)), files.path).at(KEY, str(files.path), fits=UNTIE)


def alike(one: "Tensor", other: "Tensor") -> bool:
    """Whether the values are equal, whatever their dtypes; NaN equals NaN."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _rows(files: Files, one: str, other: str) -> Iterable[tuple["Tensor", "Tensor"]]:
    shape = files.shapes[one]
    with safe_open(files.where[one], framework="pt") as left, safe_open(files.where[other], framework="pt") as right:
        if not shape:
            yield left.get_tensor(one), right.get_tensor(other)
            return
        step = max(1, ELEMENTS // max(1, math.prod(shape[1:])))
        for at in range(0, shape[0], step):
            yield tuple(f.get_slice(name)[at : at + step] for f, name in ((left, one), (right, other)))


def _whole(files: Files, parts: Mapping[str, WeightPart], shape: Sequence[int]) -> "Tensor":
    import torch

    whole = torch.empty(tuple(shape), dtype=torch.float64)
    _fill(files, parts, whole)
    return whole


def _fill(files: Files, parts: Mapping[str, WeightPart], tensor: "Tensor") -> None:
    for name, part in parts.items():
        with safe_open(files.where[name], framework="pt") as held:
            fill(tensor, held, name, part)
