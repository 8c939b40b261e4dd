"""Rough strategies that try the shape of every hook: tensor ranks, experts on a view of their own, a role of sums."""

from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from plait import MeshAxis, MeshView, ModelSpec, hookimpl, transform_param
from plait.ops import Normal, ones


class Summed(torch.autograd.Function):
    """Sum over the group forward (`forward_sum`) or backward (not): the two ends of a tensor parallel branch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, forward_sum: bool) -> Tensor:
        ctx.group, ctx.forward_sum = group, forward_sum
        if forward_sum:
            x = x.clone()
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not ctx.forward_sum:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


def local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


@attrs.define
class ToyTensor:
    """Shards heads and ffn over `toy_tp`; tokens are the same on all of its ranks."""

    phase = "model"
    degree: int = 2

    @hookimpl
    def build_mesh(self) -> list[MeshAxis]:
        return [MeshAxis("toy_tp", self.degree, shards=("heads", "kv_heads", "ffn"))]

    @hookimpl
    def parallelize(self, model: nn.Module, mesh: Any, spec: ModelSpec) -> None:
        axis = mesh["toy_tp"]
        for fqn, module in model.named_modules():
            for name, param in list(module.named_parameters(recurse=False)):
                axes = spec.axes_of(f"{fqn}.{name}")
                if mesh.sharding_axis(axes) == "toy_tp":
                    dim = next(i for i, a in enumerate(axes) if a in ("heads", "kv_heads", "ffn"))
                    sharded = distribute_tensor(param.data, axis, [Shard(dim)], src_data_rank=None)
                else:
                    sharded = distribute_tensor(param.data, axis, [Replicate()], src_data_rank=None)
                setattr(module, name, nn.Parameter(sharded))
                transform_param(module, name, local)
        for branch in spec.branches_of(model).values():
            group = axis.get_group()
            branch.register_forward_pre_hook(lambda m, args, g=group: (Summed.apply(args[0], g, False), *args[1:]))
            branch.register_forward_hook(lambda m, args, out, g=group: Summed.apply(out, g, True))


@attrs.define
class ToyExperts:
    """Shards experts over `toy_ep`, a view of the data ranks; its ranks share their tokens."""

    phase = "model"
    degree: int = 2

    @hookimpl
    def build_mesh(self) -> list[MeshView]:
        return [MeshView("toy_experts", [MeshAxis("toy_ep", self.degree, shards=("experts",))])]

    @hookimpl
    def parallelize(self, model: nn.Module, mesh: Any, spec: ModelSpec) -> None:
        axis = mesh["toy_ep"]
        for fqn, module in model.named_modules():
            for name, param in list(module.named_parameters(recurse=False)):
                if mesh.sharding_axis(spec.axes_of(f"{fqn}.{name}")) == "toy_ep":
                    setattr(
                        module, name, nn.Parameter(distribute_tensor(param.data, axis, [Shard(0)], src_data_rank=None))
                    )
                    transform_param(module, name, local)
                    module.register_forward_pre_hook(lambda m, args: (gather(args[0], axis), *args[1:]))
                    module.register_forward_hook(lambda m, args, out: scatter_sum(out, axis))


def gather(x: Tensor, axis: Any) -> Tensor:
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    return all_gather_tensor_autograd(x, 0, axis).wait()


def scatter_sum(x: Tensor, axis: Any) -> Tensor:
    from torch.distributed._functional_collectives import reduce_scatter_tensor_autograd

    return reduce_scatter_tensor_autograd(x, "sum", 0, axis).wait()


class Experts(nn.Module):
    """Every expert sees every token: a mixture without routing, which is all that a test of meshes needs."""

    def __init__(self, experts: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,edf->btef", x, self.weight).relu().sum(2)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.experts = nn.RMSNorm(dim), Experts(4, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.norm(x))


class Mixture(nn.Module):
    """Embedding, blocks of experts, head."""

    def __init__(self, dim: int = 16, layers: int = 2, vocab: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(x)

    def spec(self) -> ModelSpec:
        return ModelSpec(
            axes={
                "embed.weight": ("vocab", "embed"),
                "layers.*.norm.weight": ("embed",),
                "layers.*.experts.weight": ("experts", "embed", "ffn"),
                "head.weight": ("vocab", "embed"),
            },
            blocks=("layers.*",),
            sizes={"experts": 4},
            branches=("layers.*.experts",),
            init={"layers.*.norm.weight": ones, "layers.*.experts.weight": Normal(0.1), "*.weight": Normal(0.1)},
        )


def mixture() -> nn.Module:
    with torch.device("meta"):
        return Mixture()
