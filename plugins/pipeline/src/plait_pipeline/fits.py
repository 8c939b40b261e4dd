"""Refuses what does not fit before any rank starts. Arithmetic only."""

from typing import TYPE_CHECKING

import attrs

from plait import PlaitError, Run

if TYPE_CHECKING:
    from plait_pipeline import Pipeline

KEY = "strategy.pipeline"


@attrs.frozen
class Schedule:
    """name: of torch's class. several: whether ranks have several stages. fewest: micro-batches per rank that it needs,
    in units of `degree`; fewer run as in GPipe. stages: of a rank, by default."""

    name: str
    several: bool = False
    fewest: int = 0

    @property
    def stages(self) -> int:
        return 2 if self.several else 1


SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe"),
    "1f1b": Schedule("Schedule1F1B", fewest=1),
    "interleaved_1f1b": Schedule("ScheduleInterleaved1F1B", several=True, fewest=1),
}


def check(options: "Pipeline", run: Run) -> None:
    """Raise PlaitError for stages that the model's blocks cannot fill, and for too few micro-batches of a run."""
    several, per_rank = SCHEDULES[options.schedule].several, options.per_rank
    if several != (per_rank > 1):
        fits = "at least 2" if several else (None, 1)
        raise PlaitError(
            f"{KEY}.schedule={options.schedule} needs {'several stages' if several else 'one stage'} per rank, but "
            f"{KEY}.stages_per_rank={options.stages_per_rank}; {'2 or more' if several else '1'} would fit"
        ).at(f"{KEY}.stages_per_rank", options.stages_per_rank, fits=fits)
    if options.degree == 1:
        return
    stages, blocks = options.degree * per_rank, len(run.blocks)
    if blocks < stages:
        fits = blocks // per_rank
        raise PlaitError(
            f"{KEY}.degree={options.degree} makes {stages} stages, but the model has {blocks} blocks, and each stage "
            f"needs one; at most {fits} would fit"
        ).at(f"{KEY}.degree", options.degree, fits=f"at most {fits}")
    given = options.layers_per_stage
    if given is not None and (len(given) != stages or min(given) < 1 or sum(given) != blocks):
        raise PlaitError(
            f"{KEY}.layers_per_stage={given} does not divide the model's {blocks} blocks: it needs {stages} numbers of "
            f"at least 1 with the sum {blocks}"
        ).at(f"{KEY}.layers_per_stage", given, fits=f"{stages} numbers with the sum {blocks}")
    check_micro_batches(options, run, 1)


def check_micro_batches(options: "Pipeline", run: Run, shares: int) -> None:
    """Raise PlaitError if `plait train` would accumulate too few micro-batches on `shares` data ranks.

    Other loops may pass what they like: with too few micro-batches a step runs as in GPipe.
    """
    train, degree = run.config.train, options.degree
    if run.folder is None or degree == 1:
        return
    needs = SCHEDULES[options.schedule].fewest * degree
    rows = train.local_batch_size * shares
    found = 1 if train.global_batch_size is None else train.global_batch_size // rows
    if found < needs:
        raise PlaitError(
            f"a step has {found} micro-batch{'es' * (found > 1)} per rank, and {KEY}.schedule={options.schedule} with "
            f"{KEY}.degree={degree} needs at least {needs}; train.global_batch_size={needs * rows} would fit"
        ).at("train.global_batch_size", train.global_batch_size, fits=f"at least {needs * rows}")
    rounds = max(found // degree, 1)
    if SCHEDULES[options.schedule].several and found % rounds:
        raise PlaitError(
            f"a step has {found} micro-batches per rank, and {KEY}.schedule={options.schedule} with "
            f"{KEY}.degree={degree} runs them in {rounds} equal rounds; {found - found % degree} would fit, such as "
            f"with train.global_batch_size={(found - found % degree) * rows}"
        ).at("train.global_batch_size", train.global_batch_size, fits=(found - found % degree) * rows)
