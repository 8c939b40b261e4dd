"""Refuses what does not fit before any rank starts. Arithmetic only."""

from typing import TYPE_CHECKING

import attrs

from plait import PlaitError, Run

if TYPE_CHECKING:
    from plait_pipeline import Pipeline

KEY = "strategy.pipeline"


@attrs.frozen
class Schedule:
    """name: of torch's class. several: whether ranks have several stages. fewest: micro-batches that it needs, in units
    of `degree`; fewer run as in GPipe. split: whether gradients of weights come later than those of the stream. v:
    whether a rank has two stages, one on the way down the ranks and one back up. stages: of a rank, by default."""

    name: str
    several: bool = False
    fewest: int = 0
    split: bool = False
    v: bool = False

    @property
    def stages(self) -> int:
        return 2 if self.several else 1


SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe"),
    "1f1b": Schedule("Schedule1F1B", fewest=1),
    "interleaved_1f1b": Schedule("ScheduleInterleaved1F1B", several=True, fewest=1),
    "zero_bubble": Schedule("ScheduleInterleavedZeroBubble", several=True, fewest=1, split=True),
    "zbv": Schedule("ScheduleZBVZeroBubble", several=True, split=True, v=True),
}


def check(options: "Pipeline", run: Run) -> None:
    """Raise PlaitError for stages that the model's blocks cannot fill, and for too few micro-batches of a run."""
    schedule, per_rank = SCHEDULES[options.schedule], options.per_rank
    fits: object = (None, 2) if schedule.v else "at least 2" if schedule.several else (None, 1)
    if schedule.several != (per_rank > 1) or (schedule.v and per_rank != 2):
        needs = "2 stages" if schedule.v else "2 or more stages" if schedule.several else "1 stage"
        raise PlaitError(
            f"{KEY}.schedule={options.schedule} needs {needs} per rank, but {KEY}.stages_per_rank="
            f"{options.stages_per_rank}; null would fit"
        ).at(f"{KEY}.stages_per_rank", options.stages_per_rank, fits=fits)
    if options.degree == 1:
        return
    if schedule.split:
        _check_split(options, run)
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


def _check_split(options: "Pipeline", run: Run) -> None:
    """Refuse what cannot compute gradients of weights later: they come from the graph that forward left."""
    whole = tuple(name for name, schedule in SCHEDULES.items() if not schedule.split)
    said = f"{KEY}.schedule={options.schedule} computes the gradients of weights later than those of the stream"
    for name, other in run.strategies.items():
        if "parameter_sharding" in getattr(other, "claims", ()) and getattr(other, "phase", "runtime") == "runtime":
            raise PlaitError(
                f"{said}, when strategy {name!r} has freed the weights that it gathered; schedules that fit: "
                f"{', '.join(whole)}"
            ).at(f"{KEY}.schedule", options.schedule, fits=whole)
    if run.config.compile.enabled:
        raise PlaitError(
            f"{said}, which compiled blocks cannot, but compile.enabled=true; schedules that fit: {', '.join(whole)}"
        ).at(f"{KEY}.schedule", options.schedule, fits=whole)


def check_micro_batches(options: "Pipeline", run: Run, shares: int) -> None:
    """Raise PlaitError if `plait train` would accumulate too few micro-batches on `shares` data ranks.

    Other loops may pass what they like: with too few micro-batches a step runs as in GPipe.
    """
    train = run.config.train
    if run.folder is not None and options.degree > 1:
        rows = train.local_batch_size * shares
        check_count(options, run, 1 if train.global_batch_size is None else train.global_batch_size // rows, rows)


def check_count(options: "Pipeline", run: Run, found: int, rows: int) -> None:
    """Raise PlaitError if `found` micro-batches are too few for the schedule, or not in equal rounds.

    rows: of one micro-batch on all data ranks.
    """
    train, degree = run.config.train, options.degree
    needs = SCHEDULES[options.schedule].fewest * degree
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
