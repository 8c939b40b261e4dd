"""What a checkpoint holds for a rank, also if replicas differ on purpose, and what is wrong with it after a load."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist

from plait.host import with_replicas
from plait_testing.parity import unequal
from plait_testing.trial import full, of_all_stages

CANONICAL = ("model.", "optimizer.")  # beginnings of the names that every checkpoint has; others are a strategy's own


def everything(applied: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What any layout loads; entries of a strategy's own are left out."""
    return Loadable.of(applied, optimizer).common


@attrs.frozen
class Loadable:
    """What a checkpoint of this moment holds for this rank, by name, without entries of a strategy's own.

    place: of the replica that the rank is in; "" if no ranks differ on purpose. own: what as many replicas load here.
    common: what all others load. refuses: whether they load nothing. refusal: the sentence that came of a load instead.
    """

    place: str
    own: dict[str, torch.Tensor] = attrs.Factory(dict)
    common: dict[str, torch.Tensor] = attrs.Factory(dict)
    refuses: bool = False
    refusal: str | None = None

    @classmethod
    def of(cls, applied: Any, optimizer: torch.optim.Optimizer) -> "Loadable":
        live, place = applied.checkpoint(optimizer)[0], place_of(applied)
        saved, bound = with_replicas(live)
        named = {key: name if (name := f"replica.{place}.{key}") in saved else key for key in live}
        own = {key: saved[name] for key, name in named.items() if key.startswith(CANONICAL)}
        common = {key: tensor for key, tensor in saved.items() if key.startswith(CANONICAL)}
        own, common = (of_all_stages(applied, {key: full(t) for key, t in each.items()}) for each in (own, common))
        return cls(place, own, common, bool(bound))


def wrongly_loaded(after: Loadable, saved: list[Loadable]) -> str | None:
    """What is wrong with what a rank holds after a load; None: nothing. saved: by each rank that saved it."""
    same = next((each for each in saved if each.place == after.place), None)
    if saved[0].refuses and same is None:
        refused = "lets no other number of replicas go on" in (after.refusal or "")
        return None if refused else f"replicas = 'refuse', and another number was not refused: {after.refusal}"
    if after.refusal is not None:
        return after.refusal
    return unequal(after.own, same.own) if same else unequal(after.common, saved[0].common)


def own_axes(applied: Any) -> list[str]:
    """The axes between whose ranks parameters may differ."""
    return [axis.name for axis in applied.mesh.layout.dense if not axis.sums and axis.degree > 1]


def place_of(applied: Any) -> str:
    """Which replica this rank is in, as the names in a checkpoint say it; "" if no ranks differ on purpose."""
    meshes = {name: applied.mesh[name] for name in own_axes(applied)}
    return ", ".join(f"{name} {mesh.get_local_rank()} of {mesh.size()}" for name, mesh in meshes.items())


def wrongly_ruled(common: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor], applied: Any) -> str | None:
    """What is wrong with the values that a checkpoint has for other numbers of replicas; None: nothing. Collective.

    live: what this rank holds.
    """
    owners = {name: applied.run.strategies[applied.mesh.layout.owner[name]] for name in own_axes(applied)}
    for key, value in live.items():
        for name, owner in owners.items():
            mesh, rule = applied.mesh[name], getattr(owner, "replicas", None)
            values: list[Any] = [None] * mesh.size()
            dist.all_gather_object(values, value, group=mesh.get_group())
            is_mean = rule == "mean" and value.is_floating_point()
            value = torch.stack(values).double().mean(0).to(value.dtype) if is_mean else values[0]
        if not torch.allclose(common[key], value, rtol=1e-9, atol=1e-12):
            return f"{key!r} is not what the rule `replicas` of its strategy makes of the ranks' values"
    return None
