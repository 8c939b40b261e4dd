"""The bugs that the suite must catch, each a way in which a real system went wrong."""

from tests.mutants import batches, experts, gradients, norms, optimizers, stages, state, wire

ROOMS = (gradients, batches, experts, stages, norms, state, optimizers, wire)
MUTANTS = [mutant for room in ROOMS for mutant in room.MUTANTS]
