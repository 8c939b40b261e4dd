"""What a checkpoint holds of ranks whose values differ on purpose; of others it refuses what differs."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from plait.checkpoint.frozen_parameters import BITS, is_frozen
from plait.checkpoint.merged import merged
from plait.contract.errors import PlaitError
from plait.parallel.agreement import on_all_ranks
from plait.parallel.own_state import is_own
from plait.parallel.replica import Replica, replica_of
from plait.parallel.state import is_absent, twin_of

COLUMNS = 1024


Bound = dict[str, tuple[str, int]]


def with_replicas(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Bound]:
    """(what a checkpoint holds of a run's `state`, live as it is; what `Store.check_replicas` must know of it).
    Collective over all ranks.

    Of what differs along axes with sums=False each replica's own under its own name, and under the canonical name what
    their strategy's rule makes of them, which runs with another number of replicas load. If the rule is "refuse" there
    is nothing under the canonical name, and no other number loads it: the second answer is then, for every axis, the
    strategy that refuses and the number of ranks. Compares digests: of all entries if there are such axes, and of
    strategies' and observers' entries that no layout divides.
    Raises PlaitError, on all ranks, for an entry that differs along such an axis without a rule, and for one of a
    strategy or an observer that differs between other ranks.
    """
    replica = next(filter(None, map(replica_of, state.values())), None)
    if replica is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(state), {}
    here = {key: t for key, t in state.items() if not (is_absent(t) or is_frozen(t))}
    digests = {key: _digest(t) for key, t in here.items() if replica.axes or (is_own(key) and _is_whole(t))}
    apart, partial, refusing = _apart(replica, digests)
    place = {key: replica.place if key in apart else "" for key in digests}
    _check_own({(key, place[key]): digest for key, digest in digests.items() if is_own(key) and _is_whole(here[key])})
    result = dict(state)
    for key in sorted(apart & here.keys()):
        result[replica.own_name(key)] = result.pop(key)
        if key not in partial:
            result[key] = _common(here[key], replica)
    return result, {axis: (refusing[0], ranks) for axis, ranks in replica.ranks.items() if refusing}


def _is_whole(tensor: Tensor) -> bool:
    return not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements)


@torch.no_grad()
def _digest(tensor: Tensor) -> str:
    """Of the bits of this rank's part: of sums over rows and columns of them, which are taken where they lie."""
    local = _local(tensor)
    real = torch.view_as_real(local) if local.is_complex() else local
    bits = real.contiguous().view(-1).view(BITS[real.element_size()])
    whole = len(bits) // COLUMNS * COLUMNS
    table, rest = bits[:whole].view(-1, COLUMNS), bits[whole:].to(torch.int64)
    sums = torch.cat([table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64), rest])
    return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _apart(replica: Replica, digests: Mapping[str, str]) -> tuple[set[str], set[str], list[str]]:
    """(the entries that differ between replicas; those of them that nothing is made of for others, since the rule is to
    refuse, or since some replica lacks them, such as state that its optimizer has not created yet; the strategies with
    that rule). The same on all ranks."""
    apart, partial, refusing, refusal = set[str](), set[str](), set[str](), None
    for name, (mesh, rule, strategy) in replica.axes.items():
        group = mesh.get_group()
        total = hashlib.sha256(repr(digests).encode()).hexdigest()
        if len(set(on_all_ranks(lambda: total, group))) == 1:  # noqa: B023 - called at once
            continue
        first, *others = on_all_ranks(lambda: dict(digests), group)
        for number, other in enumerate(others, 1):
            unequal = [key for key in {**first, **other} if other.get(key) != first.get(key)]
            apart.update(unequal)
            partial |= first.keys() ^ other.keys()
            if unequal and rule == "refuse":
                partial.update(unequal)
                refusing.add(strategy)
            if unequal and rule is None and refusal is None:
                a, b = dist.get_global_rank(group, 0), dist.get_global_rank(group, number)
                refusal = (
                    f"{unequal[0]!r} differs between rank {a} and rank {b} along the axis {name!r}, so a checkpoint "
                    "would lose all but one: its strategy must say replicas = 'mean', 'first' or 'refuse', or keep "
                    "them equal"
                )
    if not replica.axes:
        return apart, partial, []
    for told in on_all_ranks(lambda: refusal, dist.group.WORLD):
        if told:
            raise PlaitError(told)
    every = (dict.fromkeys(sorted(names)) for names in (apart, partial, refusing))
    everywhere = [list(merged(own, lambda work: on_all_ranks(work, dist.group.WORLD))[0]) for own in every]
    return set(everywhere[0]), set(everywhere[1]), everywhere[2]


def _check_own(mine: Mapping[Any, str]) -> None:
    """Raises PlaitError if one entry has several digests. mine: (entry, replica) -> digest, on this rank."""
    seen: dict[Any, tuple[str, int]] = {}
    for rank, theirs in enumerate(on_all_ranks(lambda: dict(mine), dist.group.WORLD)):
        for which, digest in theirs.items():
            before, other = seen.setdefault(which, (digest, rank))
            if before != digest:
                kind, name, key = which[0].split(".", 2)
                raise PlaitError(
                    f"{key!r} of {kind} {name!r} differs between rank {other} and rank {rank}, and a checkpoint holds "
                    "one: it must be equal on all ranks, or divided as a DTensor"
                )


@torch.no_grad()
def _common(live: Tensor, replica: Replica) -> Tensor:
    """What the rules make of the replicas' values: their mean, in float32 at least, or the first's; of integers the
    first's."""
    common = twin_of(live)
    local, kept = _local(live), _local(common)
    for mesh, rule, _ in replica.axes.values():
        group, contiguous = mesh.get_group(), torch.contiguous_format
        if rule == "mean" and local.is_floating_point():
            wide = torch.promote_types(local.dtype, torch.float32)
            total = local.to(mesh.device_type, wide, copy=True, memory_format=contiguous)
            dist.all_reduce(total, group=group)
            local = total / mesh.size()
        else:
            local = local.to(mesh.device_type, copy=True, memory_format=contiguous)
            dist.broadcast(local.reshape(-1).view(torch.uint8), dist.get_global_rank(group, 0), group)
    kept.copy_(local)
    return common
