"""The groups of parameters that an optimizer gets: what each is called, what its dims mean, and where it lives."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from plait.contract.errors import PlaitError
from plait.contract.model_spec import ModelSpec
from plait.parallel.group import EACH, ParamGroup
from plait.parallel.state import canonical


def groups_of(parts: Iterable[nn.Module], spec: ModelSpec, holders: Any = None) -> list[ParamGroup]:
    """One group per mesh, of the parameters of `parts` that train; of all, if none does. A tied one stands in it once.

    params:  the parameters.
    names:   FQN of each, as in a checkpoint; of a tied one the first.
    logical: the logical axes of each, as the spec gives them.
    block:   FQN of the block that each is in, or None.
    units:   of each, per dim, how many units the dim holds, such as its heads: `ModelSpec.units_of`.
    mesh:    the DeviceMesh that all of them live on; None: they are plain tensors.
    holders: `Mesh.holders`, of all groups; None: there are no others.
    """
    found: dict[int, tuple[nn.Parameter, str, str | None]] = {}
    for part in parts:
        blocks = list(spec.blocks_of(part))
        for name, param in part.named_parameters():
            fqn = canonical(name)
            block = next((b for b in blocks if fqn.startswith(f"{canonical(b)}.")), None)
            found.setdefault(id(param), (param, fqn, block and canonical(block)))
    every = list(found.values())
    groups: dict[Any, ParamGroup] = {}
    for param, fqn, block in [each for each in every if each[0].requires_grad] or every:
        mesh = mesh_of(param)
        group = groups.setdefault(mesh, {**{key: [] for key in EACH}, "mesh": mesh, "holders": holders})
        for key, value in zip(EACH, (param, fqn, spec.axes_of(fqn), block, spec.units_of(fqn)), strict=True):
            group[key].append(value)
    return list(groups.values())


def check_all_there(optimizer: Any, groups: Iterable[ParamGroup], who: str) -> None:
    """Raises PlaitError if `optimizer`, which `who` made of `groups`, has not all their names: the others would never
    be trained."""
    there = {name for group in optimizer.param_groups for name in group.get("names", ())}
    if missing := [name for group in groups for name in group["names"] if name not in there]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise PlaitError(
            f"{who} returns an optimizer from its hook 'optimizer' whose groups do not name {missing[0]!r}{more}, "
            "which would never be trained: give make() groups with all the `names` that the hook got"
        )


def mesh_of(param: Any) -> Any:
    """The DeviceMesh that `param` lives on; None: it is a plain tensor."""
    return param.device_mesh if isinstance(param, DTensor) else None
