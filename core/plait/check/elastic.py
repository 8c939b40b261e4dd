"""What a run with `launch.nnodes=MIN:MAX` needs: numbers of machines that fit, and one global batch for all of them."""

import contextlib
import os
from collections.abc import Collection

from plait.contract.config import Train
from plait.contract.errors import PlaitError
from plait.contract.run import Run
from plait.parallel.assembly import Assembly


class NeedsFixed(PlaitError):
    """The run can go on only with as many machines as it began with."""


def machine_counts(assembly: Assembly, started: bool, asked: Collection[str]) -> tuple[tuple[int, ...], int]:
    """(How many machines may train, the data ranks of the most machines): the global batch divides among their data
    ranks, and the degrees fit.

    Pins `train.global_batch_size`, and on fewer machines than MAX makes `train.local_batch_size` one that fits.
    started: whether the ranks run already, as many as the run has; else there are those of MAX machines. asked: the
    strategies that the config names. Raises PlaitError if MAX machines do not fit, or if the run could not go on with
    another number.
    """
    run, launch = assembly.run, assembly.run.config.launch
    if planning := run.strategies.keys() - asked:
        raise NeedsFixed(
            f"launch.nnodes={launch.nnodes} needs a plan for each number of machines, but strategy="
            f"[{', '.join(asked)}] chooses {', '.join(planning)} for one: name the strategies, or set launch.nnodes to "
            "a number"
        ).at("launch.nnodes", launch.nnodes, fits=(launch.most,))
    world, train = run.world_size, run.config.train
    machines = int(os.environ.get("GROUP_WORLD_SIZE", launch.most)) if started else launch.most
    per_machine, rest = divmod(world, machines)
    if rest and not started:
        return (), 1  # said later, as for a fixed number
    if rest or (started and int(os.environ.get("LOCAL_WORLD_SIZE", per_machine)) != per_machine):
        raise PlaitError(
            f"launch.nnodes={launch.nnodes} needs as many ranks on each machine, but {machines} machines start "
            f"{world}: set launch.nproc_per_node to the same number on all"
        ).at("launch.nproc_per_node", launch.nproc_per_node)
    most = assembly.layout_for(launch.most * per_machine).count("batch")
    size = train.global_batch_size or run.resumed_batch or train.local_batch_size * most
    counts = []
    for count in launch.machines:
        with contextlib.suppress(PlaitError):
            if size % assembly.layout_for(count * per_machine).count("batch") == 0:
                counts.append(count)
    run.world_size = world
    if train.global_batch_size is not None or run.resumed_batch is None:  # else what resumes keeps the checkpoint's
        run.set("train.global_batch_size", size)
        _fit_local(run, train, size, assembly.layout.count("batch") if machines < launch.most else 1)
    return tuple(counts), most


def _fit_local(run: Run, train: Train, size: int, data_ranks: int) -> None:
    rows, rest = divmod(size, data_ranks)
    if not rest and data_ranks > 1:
        run.set(
            "train.local_batch_size", max(n for n in range(1, min(train.local_batch_size, rows) + 1) if not rows % n)
        )
