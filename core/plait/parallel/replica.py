"""Which of the replicas a rank is in that differ on purpose: those along axes with sums=False."""

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

    axes: name -> (the ranks along it, the rule of its strategy), of each axis with sums=False and several ranks. The
    rule is "mean", "first" or None; see the class attribute `replicas` in the hookspecs.
    """

    axes: "Mapping[str, tuple[DeviceMesh, str | None]]"

    @classmethod
    def of(cls, mesh: "Mesh", strategies: Mapping[str, Any]) -> "Replica":
        own = [axis for axis in mesh.layout.dense if not axis.sums and axis.degree > 1]
        rules = {axis.name: getattr(strategies.get(mesh.layout.owner[axis.name]), "replicas", None) for axis in own}
        return cls({name: (mesh[name], rule) for name, rule in rules.items()})

    @property
    def place(self) -> str:
        return ", ".join(f"{name} {mesh.get_local_rank()} of {mesh.size()}" for name, (mesh, _) in self.axes.items())

    def own_name(self, key: str) -> str:
        """The name under which a checkpoint holds what this replica alone has of `key`."""
        return f"replica.{self.place}.{key}"

    def mark(self, state: Mapping[str, Tensor]) -> None:
        """Let `replica_of` return this for what is in `state`."""
        for tensor in state.values():
            setattr(tensor, _REPLICA, self)


def replica_of(tensor: Tensor) -> Replica | None:
    """None: it comes from no run."""
    return getattr(tensor, _REPLICA, None)
