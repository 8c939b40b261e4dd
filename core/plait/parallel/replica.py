"""Which of the replicas a rank is in that differ on purpose: those along axes with sums=False."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from plait.parallel.mesh import Mesh

_REPLICA = "_plait_replica"


@attrs.frozen(eq=False)
class Replica:
    """The replica of this rank.

    axes: name -> (the ranks along it, the rule of its strategy, that strategy), of each axis with sums=False and
    several ranks. The rule is "mean", "first", "refuse" or None; see the class attribute `replicas` in the hookspecs.
    """

    axes: "Mapping[str, tuple[DeviceMesh, str | None, str]]"

    @classmethod
    def of(cls, mesh: "Mesh", strategies: Mapping[str, Any]) -> "Replica":
        own = [axis for axis in mesh.layout.dense if not axis.sums and axis.degree > 1]
        owners = {axis.name: mesh.layout.owner[axis.name] for axis in own}
        rules = {name: getattr(strategies.get(owner), "replicas", None) for name, owner in owners.items()}
        return cls({name: (mesh[name], rules[name], owner) for name, owner in owners.items()})

    @property
    def ranks(self) -> dict[str, int]:
        """Axis -> how many ranks are along it."""
        return {name: mesh.size() for name, (mesh, _, _) in self.axes.items()}

    @property
    def place(self) -> str:
        return ", ".join(f"{name} {mesh.get_local_rank()} of {mesh.size()}" for name, (mesh, _, _) in self.axes.items())

    def own_name(self, key: str) -> str:
        """The name under which a checkpoint holds what this replica alone has of `key`."""
        return f"replica.{self.place}.{key}"

    def mark(self, state: Mapping[str, Tensor]) -> None:
        """Let `replica_of` return this for what is in `state`."""
        for tensor in state.values():
            setattr(tensor, _REPLICA, self)


def shared_name(key: str) -> str:
    """The name of an entry of a checkpoint, without the replica that it is of."""
    return re.sub(r"^replica\..*? \d+ of \d+\.", "", key)


def replica_of(tensor: Tensor) -> Replica | None:
    """None: it comes from no run."""
    return getattr(tensor, _REPLICA, None)
