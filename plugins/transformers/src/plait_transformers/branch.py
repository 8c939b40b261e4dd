"""The logical axes of a branch's parameters: supposed from which matrices read and write the stream, then tried.

A branch is divided only if the results of its two halves add up to its own: what tensor parallelism needs. Otherwise
it stays whole, and its matrices name `embed`.
"""

import copy
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from plait_transformers.experts import SortedExperts
from plait_transformers.watch import Attended, Call, Watch, same

BOUND = 1e-4
Axes = dict[str, tuple[str | None, ...]]


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
    readers, writers = _ends(fqn, branch, call, watch)
    matrices = {f"{fqn}.{n}".strip(".") for n, p in branch.named_parameters() if p.dim() > 1}
    known = {f"{name}.weight" for name in (*readers, *writers)}
    if len(writers) != 1 or not readers or matrices != known:
        return Roles({}, "not all of its matrices read the stream or write to it")
    writer = writers[0]
    rows = {name: watch.calls[name].result.shape[-1] for name in readers}  # type: ignore[union-attr]
    inner = watch.calls[writer].entered.shape[-1]  # type: ignore[union-attr]
    attended = [a for name, a in watch.attended.items() if name.startswith(f"{fqn}.")]
    axis = _of_attention(rows, inner, attended[0]) if len(attended) == 1 else dict.fromkeys(rows, "ffn")
    if axis is None or (not attended and set(rows.values()) != {inner}):
        return Roles({}, "one of its matrices holds several in one, such as queries, keys and values")
    axes: Axes = {}
    for name, parameter in branch.named_parameters():
        full = f"{fqn}.{name}"
        owner, _, kind = full.rpartition(".")
        if owner in axis:
            axes[full] = (axis[owner], "embed") if kind == "weight" else (axis[owner],)
        elif owner == writer:
            axes[full] = ("embed", axis[readers[0]]) if kind == "weight" else ("embed",)
        else:
            axes[full] = (None,) * parameter.dim()
    try:
        right = _halves_add_up(fqn, branch, call, axes, attended)
    except Exception as error:
        return Roles({}, f"half of it fails: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
    return Roles(axes) if right else Roles({}, "its halves do not add up to the whole, as with a norm over all heads")


def undivided(fqn: str, branch: nn.Module, watch: Watch) -> Axes:
    """The axes of a branch that stays whole."""
    call = watch.calls.get(fqn)
    readers, writers = _ends(fqn, branch, call, watch) if call else ([], [])
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


def _ends(fqn: str, branch: nn.Module, call: Call, watch: Watch) -> tuple[list[str], list[str]]:
    """The Linears that read what the branch gets, and those whose result it returns."""
    readers, writers = [], []
    for name, module in branch.named_modules():
        full = f"{fqn}.{name}" if name else fqn
        if isinstance(module, nn.Linear) and full in watch.calls and len(watch.places[full]) == 1:
            if same(watch.calls[full].entered, call.entered):
                readers.append(full)
            if same(watch.calls[full].result, call.result):
                writers.append(full)
    return readers, writers


def _of_attention(rows: dict[str, int], inner: int, seen: Attended) -> dict[str, str] | None:
    """Reader -> its axis, if they are a matrix each for queries, keys and values."""
    heads, groups = seen.q[1], seen.k[1]
    wanted = [heads * seen.q[3], groups * seen.k[3], groups * seen.v[3]]
    if sorted(rows.values()) != sorted(wanted) or inner != heads * seen.v[3]:
        return None
    if heads == groups:
        return dict.fromkeys(rows, "heads")
    return {name: "heads" if count == wanted[0] else "kv_heads" for name, count in rows.items()}


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
                if axis in ("heads", "ffn") or (axis == "kv_heads" and not single):
                    value = value.chunk(2, dim)[half]
            if its == ("embed",) and half:
                value = torch.zeros_like(value)
            owner._parameters[own] = nn.Parameter(value.clone())
        result: Any = part(*call.args, **call.kwargs)
        first = result[0] if isinstance(result, tuple) else result
        total = first if total is None else total + first
    assert total is not None
    assert call.result is not None
    if total.shape != call.result.shape:
        return False
    return float((total - call.result).abs().max()) <= BOUND * float(call.result.abs().max())
