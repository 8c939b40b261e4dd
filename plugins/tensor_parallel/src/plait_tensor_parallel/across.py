"""Modules that combine all units of a divided axis, such as a norm over all heads: they get those of all ranks."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def get_whole(module: nn.Module, axis: Any, units: int) -> None:
    """Call `module` with the units of all ranks of `axis`, along the last dim; of its result a rank keeps its own.

    Other arguments of the same shape, such as a gate, are gathered too.
    units: of the whole. If there are fewer than ranks, several ranks have the same one, and one of them counts.
    """
    ranks, rank = axis.size(), axis.get_local_rank()
    same = max(1, ranks // units)

    def gathered(x: Tensor) -> Tensor:
        last = x.dim() - 1
        lying = DTensor.from_local(x, axis, [Shard(last)], run_check=False)
        whole = lying.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return whole.unflatten(-1, (ranks, -1))[..., ::same, :].flatten(-2) if same > 1 else whole

    def before(module: nn.Module, args: Any) -> Any:
        shape = args[0].shape
        return tuple(gathered(x) if isinstance(x, Tensor) and x.shape == shape else x for x in args)

    def after(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        width = result.shape[-1] * same // ranks
        return result.narrow(-1, rank // same * width, width)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
