"""What a checkpoint holds of workers that have stepped since their last average."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from plait import is_loaded, room_for, twin_of
from plait_local_sgd.workers import mean_into, own_part

if TYPE_CHECKING:
    from plait_local_sgd import LocalSgd


def saved(
    strategy: "LocalSgd", model: nn.Module, answer: Any, mesh: DeviceMesh
) -> tuple[dict[str, Tensor], Callable[[], None] | None]:
    """(state, function to call after loading), from `answer`: the same of the core or of another strategy.

    Under the canonical names is the average, which any layout loads. Under names of this strategy's is this worker's
    own: saved if workers are apart, and loaded by as many workers, whatever shards them.
    """
    live, after = answer if isinstance(answer, tuple) else (answer, None)
    if mesh.size() == 1:
        return live, after
    still = {own_part(p).data_ptr() for p in model.parameters() if not p.requires_grad}
    apart = [k for k, t in live.items() if t.is_floating_point() and own_part(t).data_ptr() not in still]
    names = {key: f"local_sgd.worker {mesh.get_local_rank()} of {mesh.size()}.{key}" for key in apart}
    state = dict(live)
    if strategy.apart:
        for key, name in names.items():
            state[name], state[key] = live[key], twin_of(live[key])
            mean_into(state[key], live[key], mesh)
    else:
        state |= {name: room_for(live[key]) for key, name in names.items()}

    def loaded() -> None:
        """The worker continues from where it was, or else from the average."""
        strategy.apart = any(is_loaded(state[name]) for name in names.values())
        with torch.no_grad():
            for key, name in names.items():
                own_part(live[key]).copy_(own_part(state[name if strategy.apart else key]))
        if after:
            after()

    return state, loaded
