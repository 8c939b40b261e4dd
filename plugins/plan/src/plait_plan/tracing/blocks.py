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
    differently are separate. A number by which each block knows its place is no difference."""
    blocks = spec.blocks_of(model)
    attributes = {fqn: _attributes(block) for fqn, block in blocks.items()}
    own = [{key for key, value in told.items() if value == _place(fqn)} for fqn, told in attributes.items()]
    places = set.intersection(*own) if own else set()
    found: dict[Any, list[str]] = {}
    for fqn, block in blocks.items():
        told = tuple((key, value) for key, value in attributes[fqn].items() if key not in places)
        found.setdefault((_tensors(block), told, remat.mode_of(fqn) if remat else None), []).append(fqn)
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


def _tensors(block: nn.Module) -> Any:
    named = (*block.named_parameters(), *block.named_buffers())
    return tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in named)


def _attributes(block: nn.Module) -> dict[tuple[str, str], str]:
    """(module, attribute) -> its value in words: the types of all modules, and attributes that are numbers, text and
    the like. Blocks of the same tensors and attributes compute the same."""
    simple = (bool, int, float, str, tuple, type(None))
    found = {}
    for name, module in block.named_modules():
        found[name, ""] = str(type(module))
        plain = {k: repr(v) for k, v in vars(module).items() if isinstance(v, simple) and k != "training"}
        found |= {(name, k): v for k, v in sorted(plain.items())}
    return found


def _place(fqn: str) -> str:
    """The place of a block in its list: `layers.7` is 7."""
    return fqn.rpartition(".")[2]
