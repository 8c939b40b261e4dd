"""Refuses, before a rank starts, parameters whose axes leave open what to sum: they would train wrong, with a
plausible loss.

A branch in which something is divided returns a summand on each rank. So everything that it adds must go through one
matrix that is divided along its input, or be a bias beside such a matrix, which one rank adds. Whatever combines the
elements of a divided axis otherwise, such as a norm, would see only a part of them.
"""

from collections.abc import Collection, Mapping

from plait import ModelSpec, PlaitError, Run, matches
from plait_tensor_parallel.degrees import KEY, SHARDED, Axes, names_of


def refuse(axes: Mapping[str, Axes], spec: ModelSpec, working: Collection[str], sequence_parallel: bool) -> None:
    """Raise PlaitError for a parameter whose effect on a sum over ranks is not determined.

    axes:    FQN -> logical axes, of the parameters that this strategy places.
    working: the branches in which something is divided.
    """
    owners: dict[str, dict[str, Axes]] = {}
    for fqn, its in axes.items():
        owners.setdefault(fqn.rpartition(".")[0], {})[fqn] = its
    branch = {owner: spec.branch_of(owner) for owner in owners}
    flat = _flat(owners, branch)
    for owner, own in owners.items():
        matrices = [its for its in own.values() if divided(its) and len(its) > 1]
        stacks = [its for its in own.values() if "experts" in its]
        for fqn, its in own.items():
            if divided(its):
                _refuse_alone(fqn, its, owner, matrices, spec)
                if branch[owner] is None and len(its) > 1:
                    _refuse_around(fqn, its, owner, owners)
                continue
            unclear = its in [_output(m) for m in matrices] and any(m[-1] not in SHARDED for m in matrices)
            if unclear and not _is_named(fqn, spec):
                raise PlaitError(
                    f"{KEY} cannot tell whether {fqn!r} {_axes(its)} is the bias of a matrix beside it; give each "
                    "matrix and its bias a module of their own, with rows for what comes out, as nn.Linear has them, "
                    "or name it in the spec's `biases` if it is added to what ranks sum"
                )
            if is_second(its, own.values()):
                continue
            whole_stack = its in stacks and "embed" in its and not any(map(divided, stacks))
            if branch[owner] in working and len(its) > 1 and (its[0] == "embed" or whole_stack):
                raise PlaitError(
                    f"{KEY} divides the work of the branch {branch[owner]!r}, but {fqn!r} {_axes(its)} writes to the "
                    "stream undivided, so its part would be added once per rank; make it a branch of its own"
                )
            if branch[owner] is None:
                _refuse_outside(fqn, its, owner, owners, flat, sequence_parallel)


def _refuse_alone(fqn: str, its: Axes, owner: str, matrices: list[Axes], spec: ModelSpec) -> None:
    """A norm over a divided axis has such a parameter; a bias has a matrix beside it, which may be a tied one."""
    named = [spec.names_of(name) for name, a in spec.axes.items() if name.rpartition(".")[0] == owner and len(a) > 1]
    beside = any(its[0] in matrix for matrix in (*matrices, *named))
    if len(its) == 1 and not beside and not spec.is_elementwise(fqn):
        raise PlaitError(
            f"{fqn!r} {_axes(its)} lies along an axis that {KEY} divides, without a matrix beside it, as the weight of "
            "a norm over that axis does, of which a rank would see only a part; normalise along dims that are not "
            "divided, or, if each of its elements acts on its own unit alone, name it in the spec's `elementwise`"
        )


def _refuse_around(fqn: str, its: Axes, owner: str, owners: Collection[str]) -> None:
    """A module inside, such as a norm of what is looked up, would see zeros for the tokens of other ranks."""
    inside = next((other for other in owners if owner and other.startswith(f"{owner}.")), None)
    if inside is not None:
        raise PlaitError(
            f"{KEY} divides {fqn!r} {_axes(its)}, and {inside!r} inside its module has parameters too: a rank would "
            "call it with its part alone; let the model call it behind that module, or name no axis that is divided"
        )


def _refuse_outside(
    fqn: str, its: Axes, owner: str, owners: dict[str, dict[str, Axes]], flat: bool, sequence_parallel: bool
) -> None:
    holds_others = any(other.startswith(f"{owner}." if owner else "") for other in owners if other != owner)
    if sequence_parallel and len(its) > 1 and "embed" in its and holds_others:
        raise PlaitError(
            f"{fqn!r} {_axes(its)} belongs to a module that holds others, so {KEY} cannot give it this rank's share of "
            f"the positions; make it an nn.Embedding that is called with them, or set {KEY}.sequence_parallel=false"
        ).at(f"{KEY}.sequence_parallel", True, fits=(False,))
    if not sequence_parallel and flat and its and "embed" not in its:
        raise PlaitError(
            f"{KEY} cannot tell whether {fqn!r} {_axes(its)} acts on the stream or between the divided matrices of a "
            f"feed-forward; name that feed-forward in the spec's branches, or set {KEY}.sequence_parallel=true"
        ).at(f"{KEY}.sequence_parallel", False, fits=(True,))


def is_bias(fqn: str, its: Axes, matrices: list[Axes], spec: ModelSpec) -> bool:
    """Whether an undivided parameter is added to the result of a matrix beside it, of which each rank has a summand."""
    named = bool(matrices) and _is_named(fqn, spec)
    return not divided(its) and (named or its in [_output(m) for m in matrices if m[-1] in SHARDED])


def _is_named(fqn: str, spec: ModelSpec) -> bool:
    return any(matches(pattern, fqn) for pattern in spec.biases)


def is_second(its: Axes, beside: Collection[Axes]) -> bool:
    """Whether a matrix reads only what one beside it writes, of which each rank has a summand: so its result is one.

    The axis between the two has a name, and is the one's last and the other's next to last.
    """
    return (
        len(its) > 1
        and its[-1] is not None
        and any(len(m) > 1 and m[-1] in SHARDED and m[-2] == its[-1] for m in beside)
    )


def divided(its: Axes) -> bool:
    return any(axis in SHARDED for axis in its)


def foreseen(run: Run) -> tuple[dict[str, Axes], set[str]]:
    """What is known before there is a mesh: axes of parameters that no other strategy may claim, divided branches."""
    axes = {fqn: names_of(run.spec, fqn) for fqn in run.shapes}
    own = {fqn: its for fqn, its in axes.items() if {*its} <= {*SHARDED, "embed", None}}
    return own, {b for fqn, its in own.items() if divided(its) and (b := run.spec.branch_of(fqn))}


def _output(matrix: Axes) -> Axes:
    """The remaining axes of a divided matrix after summing over the divided one."""
    (dim, *_) = [d for d, axis in enumerate(matrix) if axis in SHARDED]
    return matrix[:dim] + matrix[dim + 1 :]


def _flat(owners: dict[str, dict[str, Axes]], branch: dict[str, str | None]) -> bool:
    """Whether anything but the vocabulary is divided outside branches."""
    inner = set(SHARDED) - {"vocab"}
    return any(inner & set(its) for owner, own in owners.items() if branch[owner] is None for its in own.values())


def _axes(its: Axes) -> str:
    return f"({', '.join(map(str, its))}{',' * (len(its) == 1)})"
