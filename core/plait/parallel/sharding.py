"""How strategies divide what is stored: parameters as DTensors, and the dim that data-parallel ranks divide."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor


def distribute_params(model: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Make the parameters of `model` with these FQNs DTensors over the 1-D `mesh`, in place, without communication.

    Every rank must hold the same values, or the parameters are on meta. A tied parameter stays one, and takes the
    placement of the first of its FQNs that is given.
    """
    made: dict[int, nn.Parameter] = {}
    for prefix, module in list(model.named_modules()):
        for name, param in module._parameters.items():
            placement = placements.get(f"{prefix}.{name}" if prefix else name)
            if param is None or placement is None:
                continue
            if id(param) not in made:
                whole = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
                made[id(param)] = nn.Parameter(whole, requires_grad=param.requires_grad)
            module._parameters[name] = made[id(param)]


def own_chunk(tensor: Tensor, ranks: int, rank: int, dim: int = 0) -> Tensor:
    """The part, as a view, that `rank` gets if `torch.chunk` divides `tensor` over `ranks` along `dim`.

    Parts have the same length, but the last ones may be shorter or empty. torch itself makes the parts of all ranks, so
    a rank of a large world would spend most of its set-up on those of the others.
    """
    size = tensor.shape[dim]
    length = -(-size // ranks)
    start = min(length * rank, size)
    return tensor.narrow(dim, start, min(length, size - start))


def shard_dim(param: Tensor, ranks: int) -> int:
    """The dim that `ranks` data-parallel ranks divide: rows, if there are as many as ranks.

    If there are fewer (a few experts), it is the first other dim that divides evenly and is not divided yet.
    """
    local = param.to_local() if isinstance(param, DTensor) else param
    if local.dim() == 0 or local.shape[0] >= ranks:
        return 0
    taken = {getattr(p, "dim", None) for p in param.placements} if isinstance(param, DTensor) else set()
    return next((d for d in range(1, local.dim()) if d not in taken and local.shape[d] % ranks == 0), 0)
