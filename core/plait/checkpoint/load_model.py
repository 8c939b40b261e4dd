"""A model that a run has trained, to use it: under any layout, without its optimizer."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from plait.checkpoint.at_address import open_store
from plait.checkpoint.restore import restore
from plait.contract.config import Config
from plait.contract.errors import PlaitError
from plait.parallel.apply import set_up
from plait.parallel.assembly import assemble
from plait.parallel.process_group import device_of, start_group
from plait.system.disk import place

if TYPE_CHECKING:
    from plait.parallel.applied import Applied


def load_model(
    config: Config,
    checkpoint: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> "Applied":
    """The model of `config` under its strategies, with trained weights and in evaluation mode, on the ranks that call
    this together.

    checkpoint: a checkpoint of any layout; None: the weights are those that `checkpoint.init_from` names, or random.
    say: gets a line about where they are from. Starts the process group if there is none. Raises PlaitError if the
    checkpoint is damaged or of another model.
    """
    start_group(device_of(config.launch.device), config.launch.timeout_seconds)
    applied = set_up(assemble(config, dist.get_world_size()))
    path = None if checkpoint is None else place(checkpoint)
    store = open_store(Path() if path is None else path.parent)

    def given() -> Path | None:
        if path in store.damaged:
            raise PlaitError(f"the checkpoint {path} is damaged: {store.damaged[path]}")
        return path

    restore(store, applied, None, config.checkpoint.init_from, given, say)
    for part in applied.parts:
        part.eval()
    return applied
