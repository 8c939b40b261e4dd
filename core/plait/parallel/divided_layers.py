"""What the core checks and joins in a run whose layers are divided: ranks hold some stages of the model."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.contract.axes import MeshLayout, describe
from plait.contract.errors import PlaitError
from plait.contract.model_spec import ModelSpec
from plait.parallel.expert_balance import Counted, routers_by_block
from plait.parallel.stages import Passing, check_stages
from plait.parallel.state import shapes, tied_names
from plait.strategies.hooks import Hooks
from plait.strategies.order import Turn
from plait.strategies.registry import described

if TYPE_CHECKING:
    from plait.parallel.mesh import Mesh


@attrs.frozen
class WholeModel:
    """What is known of the whole model. shapes: FQN -> shape of its part of a checkpoint, in the model's order. ties:
    further FQN of a tied parameter -> its first. routers: name in metrics -> number of experts."""

    shapes: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, str]
    routers: Mapping[str, int]

    @classmethod
    def of(cls, model: nn.Module, spec: ModelSpec) -> "WholeModel":
        """model: before any strategy acts."""
        routers = {name: len(router.seen) for name, router in routers_by_block(model, spec).items()}
        return cls(shapes(model), tied_names(model), routers)

    def counted(self, own: Mapping[str, Any], mesh: "Mesh") -> Counted | None:
        """What the last step sent to the experts of all stages. own: the routers of this rank's; None without any."""
        if not self.routers:
            return None
        sizes = list(self.routers.values())
        counts = torch.zeros(sum(sizes), dtype=torch.int64, device=mesh.device_type)
        for name, part in zip(self.routers, counts.split(sizes), strict=True):
            if name in own:
                part.copy_(own[name].counts)
        return Counted(over_stages(counts, mesh), list(self.routers), sizes)


def check_divided(layout: MeshLayout, hooks: Hooks, model: nn.Module, spec: ModelSpec) -> None:
    """Raises PlaitError if no strategy cuts the model and runs the stages, or if `model` cannot be cut."""
    cut = [axis for axis in layout.dense if axis.splits == "layers" and axis.degree > 1]
    these = f"the axes {describe(cut, layout.owner)} split the layers"
    if "stages" not in hooks.roles or not hooks.owners("forward_backward"):
        raise PlaitError(
            f"{these}, but no selected strategy cuts the model into stages and runs them; add a strategy that claims "
            "'stages' and has the hook 'forward_backward'"
        )
    check_stages(model, spec, these)


def stages_of(made: Sequence[Any], turn: Turn, hooks: Hooks) -> list[nn.Module]:
    """The modules in `made`, some of which are lists. Raises PlaitError unless this strategy may return stages."""
    if turn.phase != "stages" or hooks.roles.get("stages") != turn.name:
        raise PlaitError(
            f"{described(turn.name)} returned a list from its hook 'parallelize', which must return a torch module, or "
            "None after a change in place: only a strategy with phase = 'stages' that claims 'stages' may return stages"
        )
    return [stage for each in made for stage in (each if isinstance(each, list) else [each])]


PASSING = Passing(first=True, last=True)  # of a module that is not cut


def check_called(
    names: Sequence[str], parts: Sequence[nn.Module], called: Sequence[int], count: int, left: int
) -> None:
    """Raises PlaitError unless the strategies that run or wrap the step called the loss once for each of `count`
    micro-batches where the model's end is, and nowhere else. left: micro-batches that they did not ask for."""
    ends = any(getattr(part, "_passing", PASSING).last for part in parts)
    expected = list(range(count)) if ends else []
    if left or sorted(called) != expected:
        fault = f"called the loss for the micro-batches {sorted(called)} instead of {expected}"
        if left:
            fault = f"left {left} of {count + left} micro-batches"
        who = " or ".join(map(described, names))
        raise PlaitError(f"{who} {fault}, in its hook 'forward_backward': the gradients would be wrong")


def over_stages(x: Tensor, mesh: "Mesh", op: Any = dist.ReduceOp.SUM) -> Tensor:
    """`x`, on the mesh's device, reduced in place over the ranks that divide the layers."""
    for axis in mesh.layout.dense:
        if axis.splits == "layers" and axis.degree > 1:
            dist.all_reduce(x, op, group=mesh[axis.name].get_group())
    return x


def norm_over_stages(norm: Tensor, mesh: "Mesh", norm_type: float) -> Tensor:
    """The norm over all stages, from that of this rank's. In float64: squares of a float32 norm may overflow."""
    wide = norm.to(mesh.device_type, torch.float64)
    if math.isinf(norm_type):
        return over_stages(wide, mesh, dist.ReduceOp.MAX).to(norm)
    return (over_stages(wide**norm_type, mesh) ** (1 / norm_type)).to(norm)
