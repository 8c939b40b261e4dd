"""Refuses what does not fit before any rank starts. Arithmetic only."""

from plait import PlaitError, Run

KEY = "strategy.expert_parallel"
AXIS = "experts"  # the logical axis that is divided


def check(degree: int, run: Run) -> None:
    """Raise PlaitError for a model without experts, or with experts that this strategy cannot divide.

    The core checks that the ranks can be divided too, because it knows all axes.
    """
    counts = _counts(run)
    if not counts:
        raise PlaitError(
            f"strategy 'expert_parallel' finds no experts in this model: no parameter has the logical axis {AXIS!r}; "
            "choose a model that has some, or leave the strategy out"
        ).at("strategy", "expert_parallel")
    for count in counts:
        if count % degree:
            fitting = [d for d in range(1, min(counts) + 1) if all(n % d == 0 for n in (*counts, run.world_size))]
            raise PlaitError(
                f"{KEY}.degree={degree} does not divide the model's {count} experts; degrees that divide them and "
                f"the {run.world_size} ranks: {', '.join(map(str, fitting))}"
            ).at(f"{KEY}.degree", degree, fits=fitting)


def _counts(run: Run) -> list[int]:
    """The numbers of experts of all stacks, each once."""
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
