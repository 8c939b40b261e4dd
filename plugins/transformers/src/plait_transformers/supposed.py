"""How a branch may be divided, supposed from which of its matrices read and write the stream.

`branch` tries it.
"""

import itertools
from collections.abc import Iterator

import attrs
from torch import nn

from plait import Packed, UnequalParts
from plait_transformers.counts import Counts, counting
from plait_transformers.experts import SortedExperts
from plait_transformers.matrices import is_matrix, widths_of
from plait_transformers.shrink import HEADS
from plait_transformers.watch import Call, Watch, proportional

Axis = str | Packed | UnequalParts | None
Axes = dict[str, tuple[Axis, ...]]  # FQN -> logical axes
MIXER = "mixer_heads"  # heads or channels of a mixer

# What the rows of a fused gate may be: parts one after another, or the rows of each unit together.
GATES: tuple[Axis, ...] = (Packed("ffn", 2), "ffn")
BIASES: tuple[tuple[Axis, ...], ...] = (("embed",), ("experts", "embed"))  # of what is written to the stream
AT_MOST = 32  # ways in which the rows of several readers are combined


@attrs.frozen
class Division:
    """How a branch may be divided.

    axes:        FQN of a parameter -> its logical axes.
    across:      FQN of a module -> the axis of which it combines all units, such as a norm over all heads.
    elementwise: parameters each of whose elements acts on its own unit alone, such as a sink per head.
    counted:     modules that count heads by attributes of their own.
    groups:      key and value heads of the small copy. units: heads, or channels, of a mixer there.
    biases:      parameters that are added once to a sum over what is divided, and are not beside an nn.Linear's weight.
    """

    axes: Axes
    across: dict[str, str] = attrs.Factory(dict)
    elementwise: tuple[str, ...] = ()
    counted: Counts = attrs.Factory(dict)
    groups: int = HEADS
    biases: tuple[str, ...] = ()
    units: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> how many units the small copy has of it."""
        return {"heads": HEADS, "kv_heads": self.groups, **({MIXER: self.units} if self.units else {})}


def moved(division: Division, of: str, to: str) -> Division:
    """`division` of the branch `of`, with the names of the branch `to`."""

    def name(fqn: str) -> str:
        return to + fqn.removeprefix(of) if fqn.startswith(of) else fqn

    return attrs.evolve(
        division,
        axes={name(fqn): axes for fqn, axes in division.axes.items()},
        across={name(fqn): axis for fqn, axis in division.across.items()},
        elementwise=tuple(name(fqn) for fqn in division.elementwise),
        counted={
            name(fqn): {attribute: (name(matrix), fixed, own) for attribute, (matrix, fixed, own) in counts.items()}
            for fqn, counts in division.counted.items()
        },
    )


def name_of(axis: Axis) -> str | None:
    return axis.axis if isinstance(axis, Packed) else axis if isinstance(axis, str) else None


@attrs.frozen
class Way:
    """One way to divide a branch.

    axes:   as above. column: the axis of the columns of the matrix that writes to the stream.
    inner:  how many columns these are. keys: rows of all keys, if they have fewer heads.
    fixed:  rows of a matrix for queries too that every rank needs, those of the only key head. groups: key heads.
    """

    axes: Axes
    column: str
    inner: int
    keys: int = 0
    fixed: int = 0
    groups: int = HEADS


def supposed(fqn: str, branch: nn.Module, call: Call, watch: Watch) -> Iterator[Division]:
    """How the branch `fqn` may be divided, the likeliest first. call: of the branch, as seen in `watch`."""
    if any(isinstance(module, SortedExperts) for module in branch.modules()):
        for form in GATES:
            axes = _of_experts(fqn, branch, call, watch, form)
            turned = [f"{fqn}.{name}" for name, m in branch.named_modules() if getattr(m, "is_transposed", False)]
            yield Division(axes, biases=_added(axes, turned))
        return
    readers, writers = ends(fqn, branch, call, watch)
    mixing = fqn in watch.mixing or any(name.startswith(f"{fqn}.") for name in watch.attended)
    if len(writers) == 1 and readers:
        yield from between(fqn, branch, readers, writers[0], mixing, watch)


def between(
    fqn: str, module: nn.Module, readers: list[str], writer: str, mixing: bool, watch: Watch
) -> Iterator[Division]:
    """How what lies between the matrices `readers` and `writer` of the module `fqn` may be divided.

    mixing: tokens are mixed there, by heads; else it is a feed-forward.
    """
    turned = not isinstance(module.get_submodule(writer.removeprefix(fqn).strip(".")), nn.Linear)
    begin, end = min(watch.places[name] for name in readers), watch.places[writer]
    inside = [name for name, places in watch.places.items() if begin < places < end]
    for way in _ways(fqn, module, readers, writer, inside if mixing else None, watch):
        per_head = _of_heads(fqn, module, way.axes) if way.column == "heads" else {}
        over = {n: axis for n, axis in _over_units(fqn, module, way, watch).items() if n in inside}
        of = dict(_readers(module, fqn, way)) if way.column == "heads" else {}
        called = dict(sorted(of.items(), key=lambda each: watch.places[each[0]]))
        biases = _added(way.axes, [writer] if turned else [])
        for counted in counting(fqn, module, way.inner, way.keys, called):
            if not {*counted} <= {*watch.calls}:
                continue  # a family may replace a module in its first forward
            for across in ({}, over) if over else ({},):
                yield Division(way.axes | per_head, across, tuple(per_head), counted, way.groups, biases)


def _added(axes: Axes, owners: list[str]) -> tuple[str, ...]:
    """The biases of `owners` that are added to a sum."""
    return tuple(name for name, its in axes.items() if name.rpartition(".")[0] in owners and its in BIASES)


def _ways(
    fqn: str, branch: nn.Module, readers: list[str], writer: str, inside: list[str] | None, watch: Watch
) -> Iterator[Way]:
    """inside: what is called between, where tokens are mixed; None: in a feed-forward."""
    rows = {name: watch.calls[name].widths()[1] for name in readers}
    inner = watch.calls[writer].widths()[0]
    if inside is None:
        yield from _of_feed_forward(fqn, branch, rows, writer, inner)
        return
    seen = [a for name, a in watch.attended.items() if name.startswith(f"{fqn}.")]
    if (not seen and inner % HEADS) or len({(a.q[1], a.k[1]) for a in seen}) > 1:
        return
    heads, groups = (seen[0].q[1], seen[0].k[1]) if seen else (HEADS, 0)
    beside = writer.rpartition(".")[0]
    others = {f"{fqn}.{n}".strip("."): m for n, m in branch.named_modules() if is_matrix(m)}
    latent = {
        name: ("heads", None)
        for name, m in others.items()
        if name in inside and name not in readers and name.rpartition(".")[0] == beside and widths_of(m)[1] % heads == 0
    }
    q, k, v = (seen[0].q[3], seen[0].k[3], seen[0].v[3]) if seen else (inner // heads,) * 3
    few = (g for g in (HEADS // 2, 1) if any(n in (g * k, (heads + 2 * g) * k) for n in rows.values()))
    kv = groups or next(few, HEADS)
    near = [name for name in rows if name.startswith(f"{beside}.")] or [*rows]  # others stay whole: an indexer
    own = [n if name in near else 0 for name, n in rows.items()]
    ways = [_of_rows(n, heads, kv, (q, k, v)) if n else [None] for n in own]
    for chosen in itertools.islice(itertools.product(*ways), AT_MOST):
        if any(chosen) or latent:
            of: dict[str, tuple[Axis, Axis]] = {n: (a, "embed") for n, a in zip(rows, chosen, strict=True)}
            axes = _of_matrices(fqn, branch, {**latent, **of}, writer, "heads")
            yield Way(axes, "heads", inner, kv * v if kv < heads else 0, k + v if kv == 1 < heads else 0, kv)


def _of_feed_forward(fqn: str, branch: nn.Module, rows: dict[str, int], writer: str, inner: int) -> Iterator[Way]:
    fused = list(rows.values()) == [2 * inner]
    for form in GATES if fused else ("ffn",):
        if fused or set(rows.values()) == {inner}:
            axes = _of_matrices(fqn, branch, dict.fromkeys(rows, (form, "embed")), writer, "ffn")
            yield Way(axes, "ffn", inner)


def _of_rows(rows: int, heads: int, groups: int, unit: tuple[int, int, int]) -> list[Axis]:
    """What the rows of a matrix that reads the stream may be, if a query, key and value head have `unit` rows."""
    q, k, v = unit
    found: list[Axis] = ["kv_heads"] if rows in (groups * k, groups * v) and heads != groups else []
    found += ["heads"] if rows in (heads * q, heads * v) else []
    if rows == heads * q + groups * (k + v):
        of_all = UnequalParts((("heads", q), ("kv_heads", k), ("kv_heads", v)))
        found += [Packed("heads", 3), "heads"] if heads == groups else [of_all]
    if rows == groups * (k + v) and heads != groups and k == v:
        found += [Packed("kv_heads", 2), "kv_heads"]
    if rows % heads == 0:
        found += ["heads", *([Packed("heads", 2)] if rows == 2 * heads * q else [])]
    if rows == heads * q + groups * (k + v) and heads != groups:
        found += ["kv_heads"]  # each group's together
    return [*dict.fromkeys(found), None]


def _readers(branch: nn.Module, fqn: str, way: Way) -> Iterator[tuple[str, int]]:
    """(matrix, rows of it that every rank needs) of those whose rows are divided."""
    for name, module in branch.named_modules():
        full = f"{fqn}.{name}".strip(".")
        if is_matrix(module):
            its = way.axes.get(f"{full}.weight", (None, None))
            of_rows = its[0] if isinstance(module, nn.Linear) else its[1]
            if of_rows not in (None, "embed"):
                yield full, way.fixed if isinstance(of_rows, UnequalParts) else 0


def _of_heads(fqn: str, branch: nn.Module, axes: Axes) -> Axes:
    """Parameters beside attention with an element for each head."""
    found: Axes = {}
    for name, module in branch.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            full = f"{fqn}.{name}.{own}".replace("..", ".")
            around = any(True for _ in module.children())
            if around and parameter.dim() == 1 and parameter.shape[0] == HEADS and axes.get(full) == (None,):
                found[full] = ("heads",)
    return found


def _over_units(fqn: str, branch: nn.Module, way: Way, watch: Watch) -> dict[str, str]:
    """Modules with a vector as long as all units of a divided axis: what they are called with, they may combine."""
    found = {}
    sizes = {way.inner: str(way.column), way.keys: "kv_heads"}
    for name, module in branch.named_modules():
        full, own = f"{fqn}.{name}", list(module.parameters(recurse=False))
        if own and not is_matrix(module) and full in watch.calls and len(watch.places[full]) == 1:
            entered = watch.calls[full].entered
            width = 0 if entered is None else entered.shape[-1]
            if width in sizes and width and {tuple(p.shape) for p in own} == {(width,)}:
                found[full] = sizes[width]
    return found


def ends(fqn: str, branch: nn.Module, call: Call, watch: Watch) -> tuple[list[str], list[str]]:
    """The matrices that read what the branch gets, and those whose result it returns, perhaps times a number."""
    readers, writers = [], []
    for name, module in branch.named_modules():
        full = f"{fqn}.{name}" if name else fqn
        if is_matrix(module) and full in watch.calls and len(watch.places[full]) == 1:
            if proportional(watch.calls[full].entered, call.entered):
                readers.append(full)
            if proportional(watch.calls[full].result, call.result):
                writers.append(full)
    return readers, writers


def _of_matrices(fqn: str, branch: nn.Module, of: dict[str, tuple[Axis, Axis]], writer: str, column: Axis) -> Axes:
    """of: matrix -> the axes of its rows and columns. writer: the one that writes to the stream from `column`."""
    axes: Axes = {}
    known = {**of, writer: ("embed", column)}
    for name, parameter in branch.named_parameters():
        owner = f"{fqn}.{name}".rpartition(".")[0]
        its: tuple[Axis, ...] = (None,) * parameter.dim()
        if owner in known:
            turned = not isinstance(branch.get_submodule(name.rpartition(".")[0]), nn.Linear)
            its = known[owner][::-1] if turned and parameter.dim() == 2 else known[owner][: parameter.dim()]
        axes[f"{fqn}.{name}"] = its
    return axes


def _of_experts(fqn: str, branch: nn.Module, call: Call, watch: Watch, form: Axis) -> Axes:
    """Those of a mixture: its experts, a feed-forward of all tokens beside them, and what sends tokens to experts."""
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
        n = getattr(module, "in_features", 0)
        if isinstance(module, SortedExperts):
            its = _of_stack(kind, module.is_transposed, form) or its
        elif isinstance(module, nn.Linear) and owner in rows:
            around, fused = owner.rpartition(".")[0], rows[owner] / 2
            its = ("ffn" if (around, rows[owner]) in feeds else form if (around, fused) in feeds else None, "embed")
        elif isinstance(module, nn.Linear) and module.out_features == width and {n, 2 * n} & {*rows.values()}:
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
