"""Saving, and loading into a model of zeros. If a framework has no way of its own: torch's distributed checkpoints."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from plait_testing.foreign.subject import Parallel

LONG = 200  # characters of an error that are told


def save_and_load(side: Any, folder: str) -> None:
    """Save, begin again with other values, and load. Collective. side: a `Side` of ranks, whose `ran` gets the outcome.
    What torch's own way refuses to save is not asked."""
    parallel, ran = side.parallel, side.ran
    if parallel.save is None and (parallel.values or parallel.shards):
        ran.unkept = "only the framework can save what it keeps in its own way; give Parallel(save=..., load=...)"
        return
    try:
        (parallel.save or (lambda where: dcp.save(_state(parallel), checkpoint_id=where)))(folder)
    except (CheckpointException, RuntimeError) as error:  # all ranks raise it
        if parallel.save is not None:
            ran.unsaved = _told(error)
        else:
            ran.unkept = f"torch's checkpoints refuse it: {_told(error)}; give Parallel(save=..., load=...)"
        return
    try:
        dist.barrier()
        side.place({name: torch.zeros_like(value) for name, value in ran.final.items()})
        (side.parallel.load or (lambda where: _load(side.parallel, where)))(folder)
    except (CheckpointException, RuntimeError) as error:
        ran.unsaved = _told(error)
        return
    ran.restored = side.held.values()


def _told(error: BaseException) -> str:
    first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    said = f"{type(first).__name__}: {str(first).splitlines()[0]}"
    return said if len(said) <= LONG else f"{said[:LONG]}..."


def _load(parallel: Parallel, folder: str) -> None:
    state = _state(parallel)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(parallel.model, parallel.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def _state(parallel: Parallel) -> dict[str, Any]:
    """The model's and the optimizer's. Collective."""
    model, optimizer = get_state_dict(parallel.model, parallel.optimizer)
    return {"model": model, "optim": optimizer}
