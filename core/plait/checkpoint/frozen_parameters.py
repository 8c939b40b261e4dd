"""The parameters of a run that do not train: not in its checkpoints, which say by a digest which they were.

The digest is a function of names and values alone: the same in every layout, wherever the values come from.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plait.checkpoint.store import Store
from plait.contract.errors import PlaitError
from plait.parallel.agreement import on_all_ranks
from plait.parallel.initialize import held_indices
from plait.parallel.state import canonical

if TYPE_CHECKING:
    from plait.parallel.applied import Applied

_FROZEN = "_plait_frozen"
MODULUS = 2**64
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
AT_ONCE = 1 << 24  # elements that are mixed at once, as integers of 64 bits
ODD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of splitmix64 (Steele et al. 2014)


@attrs.define
class Base:
    """What a run trains beside. names: the parameters that do not train, on any rank. parts: of this rank. digest: of
    their values, once they are checked."""

    names: set[str]
    parts: Sequence[nn.Module]
    digest: str = ""

    @classmethod
    def of(cls, state: Mapping[str, Tensor], applied: "Applied") -> "Base | None":
        """None if everything trains. Marks this rank's part of it in `state`. Collective."""
        own = _mark(state, applied.parts)
        names = {fqn for theirs in on_all_ranks(lambda: own, _group()) for fqn in theirs}
        return cls(names, applied.parts) if names else None

    def without(
        self, state: Mapping[str, Tensor], known: Iterable[str]
    ) -> tuple[dict[str, Tensor], list[str], dict[str, str]]:
        """What a checkpoint holds of `state` and of the names `known`, and what its manifest says of the rest."""
        _mark(state, self.parts)
        saved = {key: tensor for key, tensor in state.items() if not is_frozen(tensor)}
        return saved, [fqn for fqn in known if fqn not in self.names], {"frozen": self.digest}

    def check(self, state: Mapping[str, Tensor], path: Path | None, init_from: str | None) -> None:
        """Raises PlaitError if the checkpoint at `path` was trained beside another base than this one, whose values are
        in `state`. init_from: this run's. Collective."""
        self.digest = digest(state)
        if path is None:
            return
        manifest = Store.read(path)
        if self.names <= manifest.parameters.keys() or manifest.data.get("frozen") == self.digest:
            return
        before = (manifest.config.get("checkpoint") or {}).get("init_from")
        raise PlaitError(
            f"the run of checkpoint {path} had other frozen parameters, which the checkpoint does not hold: "
            f"use the weights of its first start (then checkpoint.init_from={before or 'null'}, now "
            f"{init_from or 'null'}), the same train.seed and the same precision.storage"
        ).at("checkpoint.init_from", init_from, fits=(before,))


def is_frozen(tensor: Tensor) -> bool:
    """Whether this is, in a checkpoint's state, a parameter that does not train: loaded if it was saved."""
    return getattr(tensor, _FROZEN, False)


def _mark(state: Mapping[str, Tensor], parts: Iterable[nn.Module]) -> list[str]:
    """Mark what does not train in `state`; returns its FQNs."""
    named = (pair for part in parts for pair in part.named_parameters(remove_duplicate=False))
    names = {canonical(name) for name, param in named if not param.requires_grad}
    present = [fqn for fqn in sorted(names) if f"model.{fqn}" in state]
    for fqn in present:
        setattr(state[f"model.{fqn}"], _FROZEN, True)
    return present


@torch.no_grad()
def digest(state: Mapping[str, Tensor]) -> str:
    """Of all frozen parameters in `state`, over all ranks. Collective.

    A sum over elements of a mix of name, place and bits, so that ranks add their own parts. Ranks with the same part
    are known by the names and places that they hold, and count once.
    """
    own: dict[str, int] = {}
    names = [key.removeprefix("model.") for key, tensor in state.items() if is_frozen(tensor)]
    parts: dict[Any, tuple[Any, int]] = {}
    for name in names:
        param = state[f"model.{name}"]
        held = [held_indices(param, dim) for dim in range(param.dim())]
        local = param.to_local() if isinstance(param, DTensor) else param
        kind = (param.device_mesh.mesh_dim_names, param.placements) if isinstance(param, DTensor) else None
        seen, total = parts.get(kind, (hashlib.sha256(), 0))
        seen.update(repr((name, [(len(h), h[:1].tolist(), h[-1:].tolist()) for h in held])).encode())
        parts[kind] = seen, (total + _mixed(name, param, local, held)) % MODULUS
    for seen, total in parts.values():
        own[seen.hexdigest()] = total
    once = {key: total for theirs in on_all_ranks(lambda: own, _group()) for key, total in theirs.items()}
    return f"{sum(once.values()) % MODULUS:016x}"


def _group() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def _mixed(name: str, param: Tensor, local: Tensor, held: list[Tensor]) -> int:
    """The sum over this rank's elements. Wraps around at 64 bits, as the sum of the ranks does."""
    start = int.from_bytes(hashlib.sha256(repr((name, tuple(param.shape), param.dtype)).encode()).digest()[:7], "big")
    if local.numel() == 0:
        return 0
    place, total = torch.full((1,) * max(local.dim(), 1), start, dtype=torch.int64, device=local.device), 0
    inner = 1
    steps = []
    for dim in reversed(range(local.dim())):
        shape = [1] * local.dim()
        shape[dim] = -1
        steps.append((held[dim].to(local.device) * inner).view(shape))
        inner *= param.shape[dim]
    for step in steps[:-1]:
        place = place + step
    rows = local.view(1) if local.dim() == 0 else local
    first = steps[-1] if steps else torch.zeros(1, dtype=torch.int64, device=local.device)
    each = max(AT_ONCE // max(rows[0].numel(), 1), 1)
    for at in range(0, len(rows), each):
        bits = rows[at : at + each].contiguous().view(BITS[rows.element_size()]).to(torch.int64)
        mixed = (place + first[at : at + each]) * ODD[0]
        mixed = (mixed ^ (mixed >> 30)) * ODD[1] + bits
        mixed = (mixed ^ (mixed >> 27)) * ODD[2]
        total += int((mixed ^ (mixed >> 31)).sum())
    return total % MODULUS
