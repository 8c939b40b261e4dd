"""Compares a step that was put together from pieces with one that is traced as it will run."""

import attrs

from plait import Cluster, Config
from plait.host import accumulation, assemble
from plait_plan.cannot import in_words
from plait_plan.pricing.pieces import Pieces
from plait_plan.pricing.price import price, put_together
from plait_plan.tracing.blocks import groups
from plait_plan.tracing.kept import steps
from plait_plan.tracing.recording import DEVICE

BLOCKS = 2  # of each kind and mode: the first and the last of them


def needs(config: Config, world: int, cluster: Cluster, found: list[Pieces]) -> float:
    """Ratio of two peaks of memory (no unit): of a step that is traced with this run's batch, degrees and
    recomputation, and a few of its blocks, to one put together of `found`.

    config: with the strategies' final options.
    """
    config = config.with_value("compile.enabled", False)
    assembly = assemble(config, world, device_type=DEVICE).extend()
    alike = groups(assembly.model, assembly.run.spec, config.remat)
    counts = [min(len(group.fqns), BLOCKS) for group in alike]
    with in_words(config):
        (step,) = steps([(config, world, 0, cluster.granularity, counts, False, True)])
    blocks = [fqn for fqn in assembly.run.blocks if fqn in step.places]
    kind_of = {fqn: kind for kind, group in enumerate(found[0].groups) for fqn in group.fqns}
    few = [attrs.evolve(one, optimizer=None) for one in found]  # a few blocks are compared
    cost = price(few, assembly.layout, cluster, config.train.local_batch_size, blocks)
    micro = accumulation(config, assembly.layout.count("batch"))
    planned = put_together(cost, [kind_of[b] for b in blocks], [config.remat.mode_of(b) for b in blocks], micro)
    return max(map(sum, step.levels)) / planned.peak
