"""The logical axes of a branch's parameters: what is `supposed` is tried.

A branch is divided only if the results of its two halves add up to its own: what tensor parallelism needs. Otherwise
it stays whole, and its matrices name `embed`.
"""

import copy
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from plait import Packed
from plait_transformers.experts import SortedExperts
from plait_transformers.supposed import Axes, ends, supposed
from plait_transformers.watch import Attended, Call, Watch

BOUND = 1e-4


@attrs.frozen
class Roles:
    """axes: FQN -> logical axes, of a branch that may be divided. why: it may not be, and why not."""

    axes: Axes
    why: str = ""


def divided(fqn: str, branch: nn.Module, watch: Watch) -> Roles:
    """The axes of the branch `fqn` that was seen in `watch`, if it can be divided."""
    call = watch.calls.get(fqn)
    if call is None or call.entered is None or call.result is None or call.entered.dim() != 3:
        return Roles({}, "it is not called with the stream once in each block")
    attended = [a for name, a in watch.attended.items() if name.startswith(f"{fqn}.")]
    found, why = supposed(fqn, branch, call, watch)
    for axes in found:
        try:
            if _halves_add_up(fqn, branch, call, axes, attended):
                return Roles(axes)
            why = "its halves do not add up to the whole, as with a norm over all heads"
        except Exception as error:
            why = f"half of it fails: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return Roles({}, why)


def undivided(fqn: str, branch: nn.Module, watch: Watch) -> Axes:
    """The axes of a branch that stays whole."""
    call = watch.calls.get(fqn)
    readers, writers = ends(fqn, branch, call, watch) if call else ([], [])
    axes: Axes = {}
    for name, parameter in branch.named_parameters():
        full = f"{fqn}.{name}"
        owner, _, kind = full.rpartition(".")
        module = branch.get_submodule(name.rpartition(".")[0])
        linear = isinstance(module, nn.Linear)
        own: list[str | None] = [None] * parameter.dim()
        if isinstance(module, SortedExperts):
            own[0] = "experts"
        if linear and kind == "weight" and owner in readers:
            own = [None, "embed"]
        elif linear and owner in writers:
            own[0] = "embed"
        axes[full] = tuple(own)
    return axes


@torch.no_grad()
def _halves_add_up(fqn: str, branch: nn.Module, call: Call, axes: Axes, attended: list[Attended]) -> bool:
    single = bool(attended) and attended[0].k[1] == 1
    total: Tensor | None = None
    for half in range(2):
        part = copy.deepcopy(branch)
        for name, parameter in list(part.named_parameters()):
            owner = part.get_submodule(name.rpartition(".")[0])
            own = name.rpartition(".")[2]
            its = axes[f"{fqn}.{name}"]
            value = parameter.detach()
            for dim, axis in enumerate(its):
                logical, parts = (axis.axis, axis.parts) if isinstance(axis, Packed) else (axis, 1)
                if logical in ("heads", "ffn") or (logical == "kv_heads" and not single):
                    value = torch.cat([part.chunk(2, dim)[half] for part in value.chunk(parts, dim)], dim)
            if its in (("embed",), ("experts", "embed")) and half:  # a bias of what is written
                value = torch.zeros_like(value)
            owner.register_parameter(own, nn.Parameter(value.clone()))
        result: Any = part(*call.args, **call.kwargs)
        first = result[0] if isinstance(result, tuple) else result
        total = first if total is None else total + first
    assert total is not None
    assert call.result is not None
    if total.shape != call.result.shape:
        return False
    return float((total - call.result).abs().max()) <= BOUND * float(call.result.abs().max())
