"""Refuses what does not fit before any rank starts. Arithmetic only."""

from plait import PlaitError, Run
from plait_pipeline.options import SCHEDULES, PipelineOptions

KEY = "strategy.pipeline"


def check(options: PipelineOptions, run: Run) -> None:
    """Raise PlaitError for stages that the model's blocks cannot fill, and for too few micro-batches of a run."""
    schedule, per_rank = SCHEDULES[options.schedule], options.per_rank
    fits: tuple[int | None, ...] | str = (None, 2) if schedule.v else "at least 2" if schedule.several else (None, 1)
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
        most = blocks // per_rank
        raise PlaitError(
            f"{KEY}.degree={options.degree} makes {stages} stages, but the model has {blocks} blocks, and each stage "
            f"needs one; at most {most} would fit"
        ).at(f"{KEY}.degree", options.degree, fits=f"at most {most}")
    given = options.layers_per_stage
    if given is not None and (len(given) != stages or min(given) < 1 or sum(given) != blocks):
        raise PlaitError(
            f"{KEY}.layers_per_stage={given} does not divide the model's {blocks} blocks: it needs {stages} numbers of "
            f"at least 1 with the sum {blocks}"
        ).at(f"{KEY}.layers_per_stage", given, fits=f"{stages} numbers with the sum {blocks}")
    check_micro_batches(options, run)


def _check_split(options: PipelineOptions, run: Run) -> None:
    """Refuse what cannot compute gradients of weights later: they come from the graph that forward left."""
    whole = tuple(name for name, schedule in SCHEDULES.items() if not schedule.split)
    problem = f"{KEY}.schedule={options.schedule} computes the gradients of weights later than those of the stream"
    for name, other in run.strategies.items():
        if "parameter_sharding" in getattr(other, "claims", ()) and getattr(other, "phase", "runtime") == "runtime":
            raise PlaitError(
                f"{problem}, when strategy {name!r} has freed the weights that it gathered; schedules that fit: "
                f"{', '.join(whole)}"
            ).at(f"{KEY}.schedule", options.schedule, fits=whole)
    if run.config.compile.enabled:
        raise PlaitError(
            f"{problem}, which compiled blocks cannot, but compile.enabled=true; schedules that fit: {', '.join(whole)}"
        ).at(f"{KEY}.schedule", options.schedule, fits=whole)


def check_micro_batches(options: PipelineOptions, run: Run, shares: int | None = None) -> None:
    """Raise PlaitError if `plait train` would accumulate too few micro-batches on `shares` data ranks.

    shares: None if they are not known yet: then only what no number of them allows is refused. Other loops may pass
    what they like: with too few micro-batches a step runs as in GPipe.
    """
    train = run.config.train
    if run.folder is None or options.degree == 1:
        return
    local, total = train.local_batch_size, train.global_batch_size
    if total is None and run.resumed_batch is not None:  # it is kept, in local batches that divide a rank's part
        total = run.resumed_batch
        part = max(total // (shares or 1), 1)
        local = max(size for size in range(1, min(local, part) + 1) if part % size == 0)
    rows = local * (shares or 1)
    micro = 1 if total is None else total // rows
    check_count(options, run, micro, rows, in_rounds=shares is not None)


def check_count(options: PipelineOptions, run: Run, micro: int, rows: int, in_rounds: bool = True) -> None:
    """Raise PlaitError if `micro` micro-batches are too few for the schedule, or not in equal rounds.

    rows: of one micro-batch on all data ranks.
    """
    train, degree = run.config.train, options.degree
    needs = SCHEDULES[options.schedule].fewest * degree
    if micro < needs:
        shares = max(rows // train.local_batch_size, 1)
        smaller, rest = divmod(train.global_batch_size or run.resumed_batch or 0, shares * needs)
        same = f"train.local_batch_size={smaller} would fit the same batch, and " if smaller and not rest else ""
        raise PlaitError(
            f"a step has {micro} micro-batch{'es' * (micro > 1)} per rank, and {KEY}.schedule={options.schedule} with "
            f"{KEY}.degree={degree} needs at least {needs}; {same}train.global_batch_size={needs * rows} would fit"
        ).at("train.global_batch_size", train.global_batch_size, fits=f"at least {needs * rows}")
    rounds = max(micro // degree, 1)
    if in_rounds and SCHEDULES[options.schedule].several and micro % rounds:
        raise PlaitError(
            f"a step has {micro} micro-batches per rank, and {KEY}.schedule={options.schedule} with "
            f"{KEY}.degree={degree} runs them in {rounds} equal rounds; {micro - micro % degree} would fit, such as "
            f"with train.global_batch_size={(micro - micro % degree) * rows}"
        ).at("train.global_batch_size", train.global_batch_size, fits=((micro - micro % degree) * rows,))
