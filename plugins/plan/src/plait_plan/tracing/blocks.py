"""Finds equal blocks of a model, and makes a model with fewer of them."""

from collections.abc import Mapping
from typing import Any

import attrs
from torch import nn

from plait import ModelSpec, Remat


@attrs.frozen
class Group:
    """Blocks that are equal. fqns: in order."""

    fqns: tuple[str, ...]


def groups(model: nn.Module, spec: ModelSpec, remat: Remat | None = None) -> list[Group]:
    """The blocks of `model` in groups of equal ones, in order of the first of each; with `remat`, blocks that recompute
    differently are separate."""
    found: dict[Any, list[str]] = {}
    for fqn, block in spec.blocks_of(model).items():
        found.setdefault((_signature(block), remat.mode_of(fqn) if remat else None), []).append(fqn)
    return [Group(tuple(fqns)) for fqns in found.values()]


def keep(model: nn.Module, found: list[Group], counts: list[int]) -> dict[str, tuple[int, int]]:
    """Take blocks out of `model` until `counts[i]` of group i are left; returns FQN -> (group, place) of those left.

    Half of the remaining blocks are a group's first ones, half its last: a strategy may treat those differently.
    """
    left: dict[str, tuple[int, int]] = {}
    for number, (group, count) in enumerate(zip(found, counts, strict=True)):
        first = (count + 1) // 2
        stay = [*group.fqns[:first], *group.fqns[len(group.fqns) - (count - first) :]]
        left |= {fqn: (number, place) for place, fqn in enumerate(stay)}
        for fqn in group.fqns:
            if fqn not in left:
                parent, _, name = fqn.rpartition(".")
                delattr(model.get_submodule(parent), name)
    return left


def block_of(fqn: str, blocks: Mapping[str, Any]) -> str | None:
    """The block that contains, or is, the module `fqn`."""
    while fqn:
        if fqn in blocks:
            return fqn
        fqn = fqn.rpartition(".")[0]
    return None


def _signature(block: nn.Module) -> Any:
    """Equal for blocks that compute the same on tensors of the same shapes."""
    tensors = tuple(
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in (*block.named_parameters(), *block.named_buffers())
    )
    parts = tuple((name, type(m), _plain(m)) for name, m in block.named_modules())
    return tensors, parts


def _plain(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """A module's attributes that are numbers, text and the like."""
    simple = (bool, int, float, str, tuple, type(None))
    return tuple(sorted((k, repr(v)) for k, v in vars(module).items() if isinstance(v, simple) and k != "training"))
