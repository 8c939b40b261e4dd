"""What does not fit, said before any rank starts. Arithmetic only."""

from typing import Any

from plait import PlaitError

KEY = "strategy.expert_parallel"
AXIS = "experts"  # the logical axis that is divided


def check(degree: int, run: Any) -> None:
    """Raise PlaitError for a model without experts, or with experts that this strategy cannot divide.

    Whether the ranks can be divided too is the core's to say, which knows all axes.
    """
    counts = _counts(run)
    if not counts:
        raise PlaitError(
            f"strategy 'expert_parallel' finds no experts in this model: no parameter has the logical axis {AXIS!r}; "
            "choose a model that has some, or leave the strategy out"
        )
    for count in counts:
        if count % degree:
            fitting = [d for d in range(1, min(counts) + 1) if all(n % d == 0 for n in (*counts, run.world_size))]
            raise PlaitError(
                f"{KEY}.degree={degree} does not divide the model's {count} experts; degrees that divide them and "
                f"the {run.world_size} ranks: {', '.join(map(str, fitting))}"
            )


def _counts(run: Any) -> list[int]:
    """How many experts there are: of every stack of them, each number once."""
    axes = {fqn: run.spec.axes_of(fqn) for fqn in run.shapes}
    divided = {fqn.rpartition(".")[0] for fqn in axes if AXIS in axes[fqn]}
    whole = {fqn.rpartition(".")[0] for fqn in axes if AXIS not in axes[fqn]}
    for fqn in axes:
        if AXIS in axes[fqn][1:]:
            raise PlaitError(f"{fqn!r} has the logical axes {axes[fqn]}, but {AXIS!r} must stand first")
    if both := sorted(divided & whole):
        raise PlaitError(
            f"module {both[0]!r} has parameters of experts and others; strategy 'expert_parallel' gives a module of "
            "experts rows of other ranks, so nothing else may be in it"
        )
    return list(dict.fromkeys(shape[0] for fqn, shape in run.shapes.items() if AXIS in axes[fqn]))
