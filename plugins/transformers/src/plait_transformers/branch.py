"""The logical axes of a branch's parameters: what is `supposed` is tried.

A branch is divided only if the results of its two halves add up to its own: what tensor parallelism needs. Otherwise
it stays whole, and its matrices name `embed`.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from plait import Packed, UnequalParts
from plait_transformers.counts import follow
from plait_transformers.experts import SortedExperts
from plait_transformers.matrices import is_matrix, rows_of
from plait_transformers.mixers import StaysWhole, of_mixer
from plait_transformers.shrink import HEADS
from plait_transformers.supposed import BIASES, Axes, Axis, Division, ends, moved, name_of, supposed
from plait_transformers.watch import Call, Watch, first

BOUND = 1e-4
NO_ENDS = "its matrices are not those of attention or of a feed-forward"


@attrs.frozen
class Roles:
    """division: how a branch may be divided. why: it may not be, and why not."""

    division: Division
    why: str = ""


def divided(fqn: str, branch: nn.Module, watch: Watch, like: tuple[str, Division] | None = None) -> Roles:
    """How the branch `fqn` that was seen in `watch` may be divided, if it may be."""
    call = watch.calls.get(fqn)
    if call is None or call.entered is None or call.result is None or call.entered.dim() != 3:
        return Roles(Division({}), "it is not called with the stream once in each block")
    why = NO_ENDS
    try:
        for division in _suppositions(fqn, branch, call, watch, like):
            try:
                if shares_add_up(fqn, branch, call, division, watch) and (
                    not _by_each_head(division) or shares_add_up(fqn, branch, call, division, watch, shares=HEADS)
                ):
                    return Roles(division)
                why = "its halves do not add up to the whole"
            except Exception as error:
                why = f"half of it fails: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    except StaysWhole as error:
        why = str(error)
    return Roles(Division({}), why)


def _suppositions(
    fqn: str, branch: nn.Module, call: Call, watch: Watch, like: tuple[str, Division] | None
) -> Iterator[Division]:
    """How the branch may be divided, the likeliest first. Raises StaysWhole for a mixer that may not be.

    like: a branch of another layer, and how it is divided.
    """
    if like is not None and like[1].units:
        yield moved(like[1], like[0], fqn)
    readers, writers = ends(fqn, branch, call, watch)
    attends = any(name.startswith(f"{fqn}.") for name in watch.attended)
    convolves = any(parameter.dim() > 2 for parameter in branch.parameters())
    if convolves and fqn in watch.mixing and not attends and len(writers) == 1:
        yield from of_mixer(fqn, branch, call, readers, writers[0], watch)
    else:
        yield from supposed(fqn, branch, call, watch)


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


def _by_each_head(division: Division) -> bool:
    """Whether each head alone should be a share, as no keys are named beside it. The halves of a matrix that holds
    pairs of queries with their one key, say, add up, although no head can be taken out of it."""
    of_all = [axis for axes in division.axes.values() for axis in axes]
    return "heads" in map(name_of, of_all) and not any(
        isinstance(axis, UnequalParts) or name_of(axis) == "kv_heads" for axis in of_all
    )


@torch.no_grad()
def shares_add_up(
    fqn: str,
    branch: nn.Module,
    call: Call,
    division: Division,
    watch: Watch,
    at: str | None = None,
    shares: int = 2,
) -> bool:
    """Whether what the shares of the module `branch` return adds up to the whole. at: of the module inside, instead."""
    whole_result, total = _result(fqn, branch, call, at), None  # that of the call may have been written to
    for share in range(shares):
        part = copy.deepcopy(branch)
        whole = {name: rows_of(module) for name, module in part.named_modules() if is_matrix(module)}
        for name, parameter in list(part.named_parameters()):
            owner = part.get_submodule(name.rpartition(".")[0])
            its = division.axes[f"{fqn}.{name}"]
            value = parameter.detach()
            for dim, axis in enumerate(its):
                runs = _runs(axis, value.shape[dim], division.sizes, shares, share)
                value = torch.cat([value.narrow(dim, *run) for run in runs], dim)
            if its in BIASES and share:  # a bias of what is written
                value = torch.zeros_like(value)
            owner.register_parameter(name.rpartition(".")[2], nn.Parameter(value.clone()))
        for name, attributes in division.counted.items():
            for attribute, (of, fixed, own) in attributes.items():
                of = of.removeprefix(f"{fqn}.")
                follow(
                    part.get_submodule(name.removeprefix(fqn).strip(".")),
                    attribute,
                    part.get_submodule(of),
                    fixed,
                    whole[of],
                    own,
                )
        for name, axis in division.across.items():
            inside = part.get_submodule(name.removeprefix(f"{fqn}."))
            get_whole(inside, watch.calls[name], axis, division.sizes, shares, share)
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


def _runs(axis: Axis, size: int, sizes: Mapping[str, int], shares: int, share: int) -> list[tuple[int, int]]:
    """(first row, number of rows) of what one of the `shares` has of a dim of `size` rows."""
    if isinstance(axis, UnequalParts):
        return axis.runs(sizes, shares, share)
    name, parts = (axis.axis, axis.parts) if isinstance(axis, Packed) else (axis, 1)
    units = {"ffn": shares, **sizes}.get(str(name), 0)
    equal = ((name, size // parts // units) if units else (None, size),) * parts
    return UnequalParts(equal).runs({**sizes, "ffn": shares}, shares, share)


def get_whole(module: nn.Module, call: Call, axis: str, sizes: Mapping[str, int], shares: int, share: int) -> None:
    """Call `module` with the units of all shares, if those that it is called with are among them; a share keeps its
    own."""
    entered = call.entered
    assert entered is not None
    ((start, count),) = _runs(axis, entered.shape[-1], sizes, shares, share)

    def before(module: nn.Module, args: Any) -> Any:
        given = list(args)
        for at, whole in enumerate(call.args):
            if isinstance(whole, Tensor) and whole.shape == entered.shape:
                own = whole.narrow(-1, start, count)
                if args[at].shape != own.shape or float((args[at] - own).abs().max()) > BOUND * float(own.abs().max()):
                    raise ValueError("a norm over all heads gets what no rank has")
                given[at] = whole
        return tuple(given)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(lambda module, args, result: result.narrow(-1, start, count))
