"""The logical axes that a branch may have, supposed from which of its matrices read and write the stream.

`branch` tries them.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from plait import Packed
from plait_transformers.experts import SortedExperts
from plait_transformers.watch import Attended, Call, Watch, same

Axis = str | Packed | None
Axes = dict[str, tuple[Axis, ...]]  # FQN -> logical axes

# What the rows of a fused matrix may be: parts one after another, or the rows of each unit together.
GATES: tuple[Axis, ...] = (Packed("ffn", 2), "ffn")
HEADS: tuple[Axis, ...] = (Packed("heads", 3), "heads")


def name_of(axis: Axis) -> str | None:
    return axis.axis if isinstance(axis, Packed) else axis


def supposed(fqn: str, branch: nn.Module, call: Call, watch: Watch) -> tuple[list[Axes], str]:
    """The axes that the parameters of the branch `fqn` may have, the likeliest first, and why there are no others.

    call: of the branch, as seen in `watch`.
    """
    if any(isinstance(module, SortedExperts) for module in branch.modules()):
        found = [axes for form in GATES if (axes := _of_experts(fqn, branch, call, watch, form)) is not None]
        return found, "its experts are transposed and have biases"
    readers, writers = ends(fqn, branch, call, watch)
    linears: dict[str, Any] = {
        f"{fqn}.{n}".strip("."): m for n, m in branch.named_modules() if isinstance(m, nn.Linear)
    }
    matrices = {f"{fqn}.{n}".strip(".") for n, p in branch.named_parameters() if p.dim() > 1}
    unknown = matrices - {f"{name}.weight" for name in (*readers, *writers)}
    seen = [a for name, a in watch.attended.items() if name.startswith(f"{fqn}.")]
    why = "not all of its matrices read the stream or write to it"
    if len(writers) != 1 or not readers or unknown - {f"{name}.weight" for name in linears}:
        return [], why
    rows = {name: watch.calls[name].widths()[1] for name in readers}
    inner = watch.calls[writers[0]].widths()[0]
    if unknown:
        of = _of_latent(linears, rows, seen[0]) if len(seen) == 1 else None
        return [_of_linears(fqn, branch, of, writers[0], "heads")] if of else [], why
    if len(seen) == 1:
        chosen: list[Any] = list(_of_attention(rows, inner, seen[0], linears))
        column: Axis = "heads"
    else:
        fused = list(rows.values()) == [2 * inner]
        fits = not seen and (fused or set(rows.values()) == {inner})
        forms = _forms(GATES, linears[readers[0]]) if fused else ["ffn"]
        chosen = [dict.fromkeys(rows, form) for form in forms] if fits else []
        column = "ffn"
    return [
        _of_linears(fqn, branch, {name: (axis, "embed") for name, axis in of.items()}, writers[0], column)
        for of in chosen
    ], "one of its matrices holds several in one, such as queries, keys and values"


def ends(fqn: str, branch: nn.Module, call: Call, watch: Watch) -> tuple[list[str], list[str]]:
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


def _of_linears(fqn: str, branch: nn.Module, of: dict[str, tuple[Axis, Axis]], writer: str, column: Axis) -> Axes:
    """of: Linear -> the axes of its weight. writer: the one that writes to the stream from `column`."""
    axes: Axes = {}
    known = {**of, writer: ("embed", column)}
    for name, parameter in branch.named_parameters():
        owner = f"{fqn}.{name}".rpartition(".")[0]
        axes[f"{fqn}.{name}"] = known.get(owner, (None,) * parameter.dim())[: parameter.dim()]
    return axes


def _of_attention(
    rows: dict[str, int], inner: int, seen: Attended, linears: dict[str, nn.Linear]
) -> Iterator[dict[str, Axis]]:
    """Reader -> its axis: a matrix each for queries, keys and values, or one for all."""
    heads, groups = seen.q[1], seen.k[1]
    wanted = [heads * seen.q[3], groups * seen.k[3], groups * seen.v[3]]
    if inner != heads * seen.v[3]:
        return
    if sorted(rows.values()) == sorted(wanted):
        other = "heads" if heads == groups else "kv_heads"
        yield {name: "heads" if count == wanted[0] else other for name, count in rows.items()}
    elif list(rows.values()) == [sum(wanted)] and heads == groups:
        (name,) = rows
        yield from ({name: form} for form in _forms(HEADS, linears[name]))


def _forms(forms: tuple[Axis, ...], fused: nn.Linear) -> list[Axis]:
    """Without parts if it has a bias, which would have no other dim for data-parallel ranks."""
    return [form for form in forms if fused.bias is None or not isinstance(form, Packed)]


def _of_latent(
    linears: dict[str, nn.Linear], rows: dict[str, int], seen: Attended
) -> dict[str, tuple[Axis, Axis]] | None:
    """Linear -> its axes, if queries or keys go through low ranks, which are for all heads."""
    heads = seen.q[1]
    if seen.k[1] != heads:
        return None
    found: dict[str, tuple[Axis, Axis]] = {}
    for name, linear in linears.items():
        if name in rows:
            found[name] = ("heads" if rows[name] == heads * seen.q[3] else None, "embed")
        elif linear.out_features % heads == 0:
            found[name] = ("heads", None)
    return found


def _of_experts(fqn: str, branch: nn.Module, call: Call, watch: Watch, form: Axis) -> Axes | None:
    """Those of a mixture: its experts, a feed-forward of all tokens beside them, and what sends tokens to experts.

    None if it cannot be divided: tensor parallelism cannot tell the biases of transposed experts from others.
    """
    readers, _ = ends(fqn, branch, call, watch)
    rows = {name: watch.calls[name].widths()[1] for name in readers}
    width = call.widths()[0]
    feeds = {  # modules with a Linear back to the stream, and the widths of these
        (f"{fqn}.{name}".rpartition(".")[0], module.in_features)
        for name, module in branch.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == width
    }
    axes: Axes = {}
    for name, parameter in branch.named_parameters():
        full = f"{fqn}.{name}"
        owner, _, kind = full.rpartition(".")
        module = branch.get_submodule(name.rpartition(".")[0])
        its: tuple[Axis, ...] = (None,) * parameter.dim()
        if isinstance(module, SortedExperts):
            if module.is_transposed and module.has_bias:
                return None
            its = _of_stack(kind, module.is_transposed, form) or its
        elif isinstance(module, nn.Linear) and owner in rows:
            its = ("ffn" if (owner.rpartition(".")[0], rows[owner]) in feeds else None, "embed")
        elif isinstance(module, nn.Linear) and module.out_features == width and module.in_features in rows.values():
            its = ("embed", "ffn")
        elif parameter.dim() == 2 and parameter.shape[-1] == width:
            its = (None, "embed")
        axes[full] = its[: parameter.dim()]
    return axes


def _of_stack(kind: str, transposed: bool, form: Axis) -> tuple[Axis, ...] | None:
    """The axes of the parameter `kind` of transformers' experts; None if it has another name."""
    down = kind.startswith("down_")
    rows: Axis = form if kind.startswith("gate_up_") else "ffn"
    if kind.endswith("_proj_bias"):
        return ("experts", "embed" if down else rows)
    if kind.endswith("_proj"):
        its = ("embed", rows) if down else (rows, "embed")
        return ("experts", *(its[::-1] if transposed else its))
    return None
