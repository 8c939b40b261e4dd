"""Does a spec fit its model? Asked before any rank starts."""

from torch import nn

from plait.contract.errors import PlaitError
from plait.contract.model_spec import ModelSpec, matches, named
from plait.contract.router import COUNTS
from plait.contract.unequal_parts import UnequalParts

# Fields of a spec that name modules.
MODULES = (
    "blocks",
    "branches",
    "routers",
    "row_means",
    "before",
    "after",
    "attention",
    "mixers",
    "documents",
    "across",
)


def check_spec(model: nn.Module, spec: ModelSpec) -> None:
    """Raises PlaitError if `spec` says something about `model` that cannot be."""
    for fqn, param in model.named_parameters():
        if len(axes := spec.axes_of(fqn)) != param.dim():
            raise PlaitError(
                f"the model's spec gives {fqn!r} the axes {axes}, but it has {param.dim()} dims: {tuple(param.shape)}"
            )
        for axis, parts, size in zip(axes, spec.parts_of(fqn), param.shape, strict=True):
            if size % parts:
                raise PlaitError(
                    f"the model's spec gives {fqn!r} the axis {axis}, but {size} is no multiple of {parts}"
                )
            if isinstance(axis, UnequalParts) and (rows := sum(n for _, n in axis.runs(spec.sizes))) != size:
                raise PlaitError(f"the model's spec gives {fqn!r} the axis {axis} of {rows} rows, but it has {size}")
    for field in MODULES:
        for pattern in (patterns,) if isinstance(patterns := getattr(spec, field) or (), str) else patterns:
            if not named(model, (pattern,)):
                raise PlaitError(f"the model's spec names {pattern!r} in `{field}`, but no module matches that pattern")
    for fqn, router in spec.routers_of(model).items():
        if missing := [name for name in (*COUNTS, "update") if not hasattr(router, name)]:
            raise PlaitError(
                f"the model's spec names {fqn!r} in `routers`, but it has no {missing[0]!r}: a router counts copies of "
                "tokens in int64 buffers now, seen and counts, and has a method update()"
            )
    for reader, writer in spec.writers.items():
        if not {reader, writer} <= {*spec.branches}:
            raise PlaitError(
                f"the model's spec says in `writers` that {writer!r} writes the result of {reader!r}: both must be "
                f"patterns in `branches`, which has {list(spec.branches)}"
            )
    for pattern in spec.biases:
        if not any(matches(pattern, fqn) for fqn, _ in model.named_parameters()):
            raise PlaitError(f"the model's spec names {pattern!r} in `biases`, but no parameter matches that pattern")
    for pattern in spec.elementwise:
        dims = {param.dim() for fqn, param in model.named_parameters() if matches(pattern, fqn)}
        if dims != {1}:
            raise PlaitError(
                f"the model's spec names {pattern!r} in `elementwise`, which must match parameters of 1 dim, and only "
                f"these; it matches {f'some of {max(dims)} dims' if dims else 'none'}"
            )
    blocks, branches = spec.blocks_of(model), spec.branches_of(model)
    for branch in branches:
        for inner, kind in [*((b, "block") for b in blocks), *((b, "branch") for b in branches if b != branch)]:
            if _within(inner, branch):
                raise PlaitError(
                    f"the model's spec names the branch {branch!r}, which {'is' if inner == branch else 'holds'} the "
                    f"{kind} {inner!r}: a branch returns one summand of the stream, and no stream runs inside it"
                )
    _check_ends(model, spec)


def _check_ends(model: nn.Module, spec: ModelSpec) -> None:
    """`before` and `after`: outside blocks, each module once, and with all that share their parameters."""
    ends = [(f, fqn) for f in ("before", "after") for p in getattr(spec, f) for fqn in named(model, (p,))]
    for i, (field, fqn) in enumerate(ends):
        subject = f"the model's spec names {fqn!r} in `{field}`"
        for block in spec.blocks_of(model):
            if _within(fqn, block) or _within(block, fqn):
                raise PlaitError(f"{subject}, but it {'is in' if _within(fqn, block) else 'holds'} the block {block!r}")
        for other, overlapping in ends[:i]:
            if _within(fqn, overlapping) or _within(overlapping, fqn):
                raise PlaitError(f"{subject}, which overlaps {overlapping!r} in `{other}`; name each module once")
    owner = {id(p): (f, fqn) for f, fqn in ends for p in model.get_submodule(fqn).parameters()}
    for fqn, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) in owner and not any(_within(fqn, end) for _, end in ends):
                field, end = owner[id(param)]
                raise PlaitError(
                    f"the model's spec names {end!r} in `{field}`, but {f'{fqn}.{name}'.lstrip('.')!r} is one of its "
                    "parameters too; name all modules that share a parameter, or none"
                )


def _within(inner: str, outer: str) -> bool:
    """Whether the module `inner` is `outer` or a part of it; "" is the model."""
    return not outer or f"{inner}.".startswith(f"{outer}.")
