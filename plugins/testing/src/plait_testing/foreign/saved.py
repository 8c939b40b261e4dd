"""What is saved and loaded if a framework has no way of its own: torch's distributed checkpoints."""

from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from plait_testing.foreign.subject import Parallel


def save(parallel: Parallel, folder: str) -> None:
    """Write the model's and the optimizer's state. Collective."""
    dcp.save(_state(parallel), checkpoint_id=folder)


def load(parallel: Parallel, folder: str) -> None:
    """Read it into a model and an optimizer that took no step. Collective."""
    state = _state(parallel)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(parallel.model, parallel.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def _state(parallel: Parallel) -> dict[str, Any]:
    model, optimizer = get_state_dict(parallel.model, parallel.optimizer)
    return {"model": model, "optim": optimizer}
