"""What a run with `launch.nnodes=MIN:MAX` needs: numbers of machines that fit, and one global batch for all of them."""

import contextlib
import math
import os

from plait.check.resumed_data import local_batch
from plait.contract.errors import PlaitError
from plait.contract.run import Run
from plait.parallel.assembly import Assembly
from plait.parallel.sequence_loss import rows_together


def machine_counts(assembly: Assembly, machines: int | None, planned: bool) -> tuple[tuple[int, ...], int]:
    """(How many machines may train, the parts of a stream): the global batch divides among their data ranks, and the
    degrees fit. Any of `machines` may train if the strategies are `planned` for so many alone.

    Pins `train.global_batch_size`, and on fewer machines than MAX makes `train.local_batch_size` one that fits.
    machines: how many there are, with as many ranks as the run has; None: MAX, and the ranks do not run yet. Raises
    PlaitError if MAX machines do not fit.
    """
    run, launch = assembly.run, assembly.run.config.launch
    world, train = run.world_size, run.config.train
    started, machines = machines is not None, machines or launch.most
    per_machine, rest = divmod(world, machines)
    if rest and not started:
        return (), 1  # said later, as for a fixed number
    if rest or (started and int(os.environ.get("LOCAL_WORLD_SIZE", per_machine)) != per_machine):
        raise PlaitError(
            f"launch.nnodes={launch.nnodes} needs as many ranks on each machine, but {machines} machines start "
            f"{world}: set launch.nproc_per_node to the same number on all"
        ).at("launch.nproc_per_node", launch.nproc_per_node)
    most = launch.most * per_machine
    parts = most if planned else assembly.layout_for(most).count("batch")
    size = train.global_batch_size or run.resumed_batch or train.local_batch_size * parts
    counts = []
    for count in (machines,) if planned else launch.machines:
        with contextlib.suppress(PlaitError):
            if size % (assembly.layout_for(count * per_machine).count("batch") * rows_together(run.config)) == 0:
                counts.append(count)
    run.world_size = world
    if train.global_batch_size is not None or run.resumed_batch is None:  # else what resumes keeps the checkpoint's
        run.set("train.global_batch_size", size)
        _fit_local(run, size, assembly.layout.count("batch") if machines < launch.most else 1)
    return tuple(counts), math.gcd(size, parts)


def _fit_local(run: Run, size: int, data_ranks: int) -> None:
    rows, rest = divmod(size, data_ranks)
    if not rest and data_ranks > 1:
        run.set("train.local_batch_size", local_batch(run.config, rows))
