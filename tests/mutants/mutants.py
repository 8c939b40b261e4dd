"""The bugs that the suite must catch, each a way in which a real system went wrong."""

from tests.mutants import batches, experts, gradients, norms, optimizers, stages, state

MUTANTS = [
    *(*gradients.MUTANTS, *batches.MUTANTS, *experts.MUTANTS, *stages.MUTANTS, *norms.MUTANTS, *state.MUTANTS),
    *optimizers.MUTANTS,
]
