"""The logical axes of a branch's parameters: what is `supposed` is tried.

A branch is divided only if the results of its two halves add up to its own: what tensor parallelism needs. Otherwise
it stays whole, and its matrices name `embed`.
"""

import copy
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from plait import Packed, UnequalParts
from plait_transformers.counts import follow, rows_of
from plait_transformers.experts import SortedExperts
from plait_transformers.matrices import is_matrix
from plait_transformers.shrink import HEADS
from plait_transformers.supposed import BIASES, Axes, Axis, Division, ends, supposed
from plait_transformers.watch import Call, Watch, first

BOUND = 1e-4
NO_ENDS = "its matrices are not those of attention or of a feed-forward"


@attrs.frozen
class Roles:
    """division: how a branch may be divided. why: it may not be, and why not."""

    division: Division
    why: str = ""


def divided(fqn: str, branch: nn.Module, watch: Watch) -> Roles:
    """How the branch `fqn` that was seen in `watch` may be divided, if it may be."""
    call = watch.calls.get(fqn)
    if call is None or call.entered is None or call.result is None or call.entered.dim() != 3:
        return Roles(Division({}), "it is not called with the stream once in each block")
    why = NO_ENDS
    for division in supposed(fqn, branch, call, watch):
        try:
            if halves_add_up(fqn, branch, call, division, watch):
                return Roles(division)
            why = "its halves do not add up to the whole"
        except Exception as error:
            why = f"half of it fails: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return Roles(Division({}), why)


def undivided(fqn: str, branch: nn.Module, watch: Watch) -> Axes:
    """The axes of a branch that stays whole."""
    call = watch.calls.get(fqn)
    readers, writers = ends(fqn, branch, call, watch) if call else ([], [])
    axes: Axes = {}
    for name, parameter in branch.named_parameters():
        full = f"{fqn}.{name}"
        owner, _, kind = full.rpartition(".")
        module = branch.get_submodule(name.rpartition(".")[0])
        linear = is_matrix(module)
        own: list[str | None] = [None] * parameter.dim()
        if isinstance(module, SortedExperts):
            own[0] = "experts"
        turned = linear and not isinstance(module, nn.Linear) and kind == "weight"
        if linear and kind == "weight" and owner in readers:
            own = ["embed", None] if turned else [None, "embed"]
        elif linear and owner in writers:
            own[-1 if turned else 0] = "embed"
        axes[full] = tuple(own)
    return axes


@torch.no_grad()
def halves_add_up(
    fqn: str, branch: nn.Module, call: Call, division: Division, watch: Watch, at: str | None = None
) -> bool:
    """Whether what two halves of the module `branch` return adds up to the whole. at: of the module inside, instead."""
    groups = division.groups
    whole_result, total = _result(fqn, branch, call, at), None  # that of the call may have been written to
    for half in range(2):
        part = copy.deepcopy(branch)
        whole = {name: rows_of(module) for name, module in part.named_modules() if is_matrix(module)}
        for name, parameter in list(part.named_parameters()):
            owner = part.get_submodule(name.rpartition(".")[0])
            its = division.axes[f"{fqn}.{name}"]
            value = parameter.detach()
            for dim, axis in enumerate(its):
                runs = _runs(axis, value.shape[dim], groups, half)
                value = torch.cat([value.narrow(dim, *run) for run in runs], dim)
            if its in BIASES and half:  # a bias of what is written
                value = torch.zeros_like(value)
            owner.register_parameter(name.rpartition(".")[2], nn.Parameter(value.clone()))
        for name, attributes in division.counted.items():
            for attribute, (of, fixed) in attributes.items():
                of = of.removeprefix(f"{fqn}.")
                follow(
                    part.get_submodule(name.removeprefix(fqn).strip(".")),
                    attribute,
                    part.get_submodule(of),
                    fixed,
                    whole[of],
                )
        for name, axis in division.across.items():
            get_whole(part.get_submodule(name.removeprefix(f"{fqn}.")), watch.calls[name].entered, axis, groups, half)
        result: Any = _result(fqn, part, call, at)
        total = result if total is None else total + result
    if total is None or whole_result is None or total.shape != whole_result.shape:
        return False
    return float((total - whole_result).abs().max()) <= BOUND * float(whole_result.abs().max())


def _result(fqn: str, module: nn.Module, call: Call, at: str | None) -> Tensor | None:
    if at is None:
        return first(module(*call.args, **call.kwargs))
    seen = list[Tensor]()
    hook = module.get_submodule(at.removeprefix(f"{fqn}.")).register_forward_hook(lambda m, a, y: seen.append(y))
    module(*call.args, **call.kwargs)
    hook.remove()
    return seen[0]


def _runs(axis: Axis, size: int, groups: int, half: int) -> list[tuple[int, int]]:
    """(first row, number of rows) of what one half has of a dim of `size` rows."""
    sizes = {"heads": HEADS, "kv_heads": groups}
    if isinstance(axis, UnequalParts):
        return axis.runs(sizes, 2, half)
    name, parts = (axis.axis, axis.parts) if isinstance(axis, Packed) else (axis, 1)
    units = sizes.get(name, 2) if name in ("heads", "kv_heads", "ffn") else 0
    equal = ((name, size // parts // units) if units else (None, size),) * parts
    return UnequalParts(equal).runs({**sizes, "ffn": 2}, 2, half)


def get_whole(module: nn.Module, whole: Any, axis: str, groups: int, half: int) -> None:
    """Call `module` with the units of both halves, if those that it is called with are among them; a half keeps its
    own."""
    ((start, count),) = _runs(axis, whole.shape[-1], groups, half)

    def before(module: nn.Module, args: Any) -> Any:
        own = whole.narrow(-1, start, count)
        if args[0].shape != own.shape or float((args[0] - own).abs().max()) > BOUND * float(own.abs().max()):
            raise ValueError("a norm over all heads gets what no rank has")
        return (whole, *args[1:])

    module.register_forward_pre_hook(before)
    module.register_forward_hook(lambda module, args, result: result.narrow(-1, start, count))
