"""Whole values and gradients of a parallel model by the names of one process, whatever shards them."""

import fnmatch
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from plait import PlaitError, held_indices, whole_tensor
from plait_testing.foreign.subject import Parallel
from plait_testing.torch_internals import flat_gradients

WRAPPERS = re.compile(
    r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
    r"|^(?:_forward_module\.)?(?:_orig_mod\.)?(?:module\.)+|^_forward_module\."
)
SHOWN = 5


class Held:
    """What the ranks hold of one model. mesh: the DeviceMesh of the comparison; None: one process, which has all."""

    def __init__(self, parallel: Parallel, mesh: Any) -> None:
        self.parallel, self.mesh = parallel, mesh
        self.flat = mesh is not None and any(isinstance(m, FullyShardedDataParallel) for m in parallel.model.modules())

    def values(self) -> dict[str, Tensor]:
        """Every parameter, whole, on the CPU. Collective."""
        if self.parallel.values is not None:
            return {name: copied(value) for name, value in self.parallel.values().items()}
        with self._summoned():
            return self._of_all({name: self._whole(name, p) for name, p in self.parameters()})

    def gradients(self) -> dict[str, Tensor]:
        """Every gradient, whole, on the CPU, and of replicas this rank's own; none of parameters that have none.
        Collective."""
        if self.parallel.gradients is not None:
            return {name: copied(value) for name, value in self.parallel.gradients().items() if value is not None}
        if self.flat and (found := flat_gradients(self.parallel.model)) is not None:
            return {plain_name(name): copied(value) for name, value in found.items()}
        with self._summoned(with_grads=True):
            mine = {name: (p, p.grad) for name, p in self.parameters() if p.requires_grad}
            some = self._anywhere({name for name, (_, grad) in mine.items() if grad is not None})
            found = {
                name: self._whole(name, torch.zeros_like(p) if grad is None else grad)
                for name, (p, grad) in mine.items()
                if name in some
            }
            return self._of_all(found)

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Write whole values into what the ranks hold."""
        if self.parallel.fill is not None:
            return self.parallel.fill(values)
        with self._summoned(writeback=True), torch.no_grad():
            for name, param in self.parameters():
                self._write(name, param, values[name])
        return None

    def lies(self) -> dict[str, str]:
        """Name -> how a parameter lies on the ranks, in words."""
        if self.flat:
            return {name: "a part of a flat parameter" for name, _ in self.parameters()}
        return {name: self._lies(name, param) for name, param in self.parameters()}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = self.parallel.names or plain_name
        for name, param in self.parallel.model.named_parameters():
            yield named(name), param

    def _summoned(self, **options: Any) -> Any:
        if not self.flat:
            return nullcontext()
        return FullyShardedDataParallel.summon_full_params(self.parallel.model, **{"writeback": False, **options})

    def _part(self, name: str, param: Tensor) -> tuple[int, str] | None:
        """(dim, axis) of a plain tensor that is a part of a parameter."""
        if isinstance(param, DTensor) or self.mesh is None:
            return None
        found = [part for pattern, part in self.parallel.shards.items() if fnmatch.fnmatchcase(name, pattern)]
        return found[0] if found else None

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        if (part := self._part(name, tensor)) is None:
            return copied(tensor)
        dim, axis = part
        group = self.mesh[axis].get_group()
        pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, tensor.detach().contiguous(), group=group)
        return copied(torch.cat(pieces, dim))

    def _write(self, name: str, param: Tensor, value: Tensor) -> None:
        if (part := self._part(name, param)) is not None:
            dim, axis = part
            value = value.chunk(self.mesh[axis].size(), dim)[self.mesh[axis].get_local_rank()]
        if isinstance(param, DTensor):
            held = torch.meshgrid(*(held_indices(param, dim) for dim in range(param.dim())), indexing="ij")
            param, value = param.to_local(), value[held] if held else value
        param.copy_(value)

    def _lies(self, name: str, param: Tensor) -> str:
        if isinstance(param, DTensor):
            names = param.device_mesh.mesh_dim_names or [f"axis {i}" for i in range(param.device_mesh.ndim)]
            return ", ".join(f"{p} over {n}" for p, n in zip(param.placements, names, strict=False))
        if (part := self._part(name, param)) is not None:
            return f"Shard(dim={part[0]}) over {part[1]}"
        return "replicated (a plain tensor)"

    def _anywhere(self, names: set[str]) -> set[str]:
        if self.mesh is None:
            return names
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, names)
        return set().union(*every)

    def _of_all(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """`own`, and what other ranks alone have, such as other stages."""
        if self.mesh is None:
            return own
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, {*own})
        common = set.intersection(*every)
        if all(names == common for names in every):
            return own
        dist.all_gather_object(every, {name: t for name, t in own.items() if name not in common})
        return {name: t for found in every for name, t in found.items()} | own


def plain_name(name: str) -> str:
    """`name` without what wrappers of torch and of those who build on it add."""
    return WRAPPERS.sub("", name)


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU of the whole tensor; collective if it is a DTensor that is sharded."""
    return whole_tensor(tensor).detach().cpu().clone()


def check_names(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises PlaitError unless the parallel model has the parameters of one process."""
    more, missing = sorted(found.keys() - expected.keys()), sorted(expected.keys() - found.keys())
    if more or missing:
        raise PlaitError(
            f"the parallel model and one process have other parameters: {_listed(more)} only on the ranks, "
            f"{_listed(missing)} only in one process; say in Parallel(names=...) how theirs are called in one process"
        ).at("names", more, fits=missing)
    for name, value in expected.items():
        if found[name].shape != value.shape:
            raise PlaitError(
                f"{name} has the shape {tuple(found[name].shape)} on ranks and {tuple(value.shape)} in one process; "
                "if each rank holds a part of it, say in Parallel(shards=...) of which dim and over which axis"
            ).at("shards", tuple(found[name].shape), fits=str(tuple(value.shape)))


def _listed(names: list[str]) -> str:
    return (", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")) or "none"
