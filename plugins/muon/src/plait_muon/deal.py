"""Who computes which matrix, and which tiles of it lie on which rank: the same answer on every rank, without
communication."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import attrs

from plait import held_by
from plait_muon.matrices import Matrices

Runs = tuple[tuple[int, int], ...]


@attrs.frozen
class Tile:
    """A part of a matrix that lies on one rank. local: (start, end) along each dim of the rank's own tensor; row,
    column: where it begins in the matrix."""

    local: tuple[tuple[int, int], ...]
    row: int
    column: int

    @property
    def shape(self) -> tuple[int, int]:
        (top, bottom), (left, right) = self.local[-2:]
        return bottom - top, right - left

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@attrs.frozen
class Matrix:
    """One matrix.

    param: number of its parameter among those dealt. number: its own in the parameter. shape: (rows, columns).
    owner: the rank that computes it. tiles: rank -> its tiles. senders: the ranks that send their tiles to the owner;
    of ranks with copies of the same tiles, one. returned: whether the owner sends it back.
    """

    param: int
    number: int
    shape: tuple[int, int]
    owner: int
    tiles: dict[int, list[Tile]]
    senders: tuple[int, ...]
    returned: bool = True


def dealt(
    params: Sequence[Any],
    matrices: Sequence[Matrices],
    holders: Any,
    costs: Sequence[float],
    loads: list[float],
    order: Sequence[int],
) -> list[list[Matrix]]:
    """The matrices of each parameter, the parameters in this `order`. A matrix gets the least loaded owner of the ranks
    that hold it whole, or else of those that hold a part of it.

    costs: of one matrix of each parameter. loads: of each rank of `holders` so far, to which they are added.
    """
    found: list[list[Matrix]] = []
    for index in order:
        each, held = matrices[index], held_by(params[index], holders)
        tiles = tiles_of(tuple(params[index].shape), each, held)
        found.append([])
        for number, of_ranks in enumerate(tiles):
            whole = [rank for rank, own in of_ranks.items() if sum(p.elements for p in own) == math.prod(each.shape)]
            owner = min(whole or of_ranks, key=lambda rank: (loads[rank], rank))
            loads[owner] += costs[index]
            copies: dict[Any, list[int]] = {}
            for rank in of_ranks:
                copies.setdefault(held[rank], []).append(rank)
            senders = sorted(min(ranks, key=lambda rank: abs(rank - owner)) for ranks in copies.values())
            found[-1].append(Matrix(index, number, each.shape, owner, of_ranks, tuple([owner] if whole else senders)))
    return found


def tiles_of(
    shape: tuple[int, ...], matrices: Matrices, held: Sequence[tuple[Runs, ...]]
) -> list[dict[int, list[Tile]]]:
    """Of each matrix: rank -> its tiles, for ranks that hold any."""
    found: list[dict[int, list[Tile]]] = [{} for _ in range(matrices.count)]
    kinds: dict[Any, list[tuple[int, Tile]]] = {}
    for rank, runs in enumerate(held):
        if runs not in kinds:
            sides = [
                cut(runs[dim], size // along)
                for dim, (size, along) in enumerate(zip(shape, matrices.grid, strict=True))
            ]
            kinds[runs] = [_tile(matrices.grid, at) for at in itertools.product(*sides)]
        for number, tile in kinds[runs]:
            found[number].setdefault(rank, []).append(tile)
    return found


def cut(runs: Runs, size: int) -> list[tuple[int, int, int, int]]:
    """(number of the unit, local start, local end, where it begins in the unit) of each run, cut where units of `size`
    begin."""
    found, local = [], 0
    for start, end in runs:
        while start < end:
            unit = start // size
            stop = min(end, (unit + 1) * size)
            found.append((unit, local, local + stop - start, start - unit * size))
            local, start = local + stop - start, stop
    return found


def _tile(grid: tuple[int, ...], at: Sequence[tuple[int, int, int, int]]) -> tuple[int, Tile]:
    number = 0
    for along, (unit, *_) in zip(grid, at, strict=True):
        number = number * along + unit
    local = tuple((start, end) for _, start, end, _ in at)
    return number, Tile(local, at[-2][3], at[-1][3])
