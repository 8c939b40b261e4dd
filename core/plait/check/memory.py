"""Whether a run can fit into its machines' memory at all: bounds that hold whatever the strategies do."""

import math
import os

from plait.check.checked import Checked
from plait.contract.errors import PlaitError
from plait.parallel.precision import dtype
from plait.records.text import size
from plait.system.accelerator import total_memory


def check_room(checked: Checked) -> None:
    """Raises PlaitError if one copy of the parameters, or the token ids of one step, need more memory than there is.

    Assumes that all machines are like this one. Whether the rest of the run fits is not checked.
    """
    config = checked.config
    have = config.launch.most * _memory()
    parameters = sum(math.prod(shape) for shape in checked.shapes.values())
    storage = config.precision.storage
    if (need := parameters * dtype(storage).itemsize) > have:
        raise PlaitError(
            f"the model has {parameters:,} parameters: one copy in precision.storage={storage} takes {size(need)}, "
            f"and {_here(config.launch.most)} {size(have)}; check the sizes in model"
        ).at("precision.storage", storage)
    train, data_ranks = config.train, checked.layout.count("batch")
    samples = train.global_batch_size or train.local_batch_size * data_ranks
    if (need := samples * train.seq_len * 16) > have:  # tokens and labels, 8 bytes each
        batch = "global_batch_size" if train.global_batch_size else "local_batch_size"
        raise PlaitError(
            f"train.{batch}={getattr(train, batch)} with train.seq_len={train.seq_len}: the token ids of one step take "
            f"{size(need)}, and {_here(config.launch.most)} {size(have)}"
        ).at(f"train.{batch}", getattr(train, batch))


def _memory() -> int:
    """Bytes of this machine, its GPUs included."""
    return total_memory() + os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _here(nnodes: int) -> str:
    return "this machine has" if nnodes == 1 else f"{nnodes} machines like this one have"
