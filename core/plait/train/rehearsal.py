"""Tries an optimizer on stand-ins: whether its kernels accept a run's parameters, and treat a shard as a shard."""

from collections.abc import Callable, Iterable
from math import isfinite, prod
from textwrap import shorten
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from plait.parallel.group import ParamGroup, part_of
from plait.parallel.stand_in import stand_in, undisturbed
from plait.system.errors import one_line

ROWS = 8  # largest size of a stand-in per shard of a dim
STEPS = 2  # the first creates the optimizer's state, the second uses it
OFF = 0.1  # of the step itself: far above rounding, even inside an optimizer that computes in bfloat16

Build = Callable[[list[ParamGroup]], Any]


class ArgumentsRefused(Exception):
    """The optimizer's class does not accept its arguments."""


@attrs.frozen
class Kind:
    """What kernels see of a parameter, and a small shape that is divided over ranks as its own is: evenly or not.

    logical: its logical axes, by which an optimizer may treat it; None: they are not known.
    """

    mesh: Any
    placements: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    logical: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, param: Tensor, logical: tuple[Any, ...] | None = None) -> "Kind":
        mesh: Any = param.device_mesh if isinstance(param, DTensor) else None
        placements = param.placements if isinstance(param, DTensor) else ()
        shape = []
        for dim, size in enumerate(param.shape):
            shards = prod([mesh.size(i) for i, p in enumerate(placements) if getattr(p, "dim", None) == dim])
            most = ROWS * shards
            shape.append(size if size <= most else most - min(-size % shards, ROWS - 1))
        device = torch.device("cpu") if param.is_meta else param.device
        return cls(mesh, tuple(placements), param.dtype, device, tuple(shape), logical)

    @property
    def sharded(self) -> bool:
        return any(hasattr(placement, "dim") for placement in self.placements)

    def place(self, whole: Tensor) -> Tensor:
        """`whole`, which all ranks have, with the placement of a parameter of this kind."""
        if self.mesh is None:
            return whole.to(self.device)
        lying = distribute_tensor(whole.to(self.mesh.device_type), self.mesh, self.placements, src_data_rank=None)
        return lying.to(self.device)  # not the mesh's device if parameters are kept on the CPU

    def __str__(self) -> str:
        how = f"{len(self.shape)} dim(s), {str(self.dtype).removeprefix('torch.')}, on {self.device.type}"
        if self.mesh is None:
            return f"plain tensors of {how}"
        names = self.mesh.mesh_dim_names or range(len(self.placements))
        lies = ", ".join(f"{placement!r} over {name}" for placement, name in zip(self.placements, names, strict=True))
        return f"DTensors of {how}, {lies}"


@attrs.frozen
class KindsOfGroup:
    """What an optimizer sees of one of its groups: the kinds of its parameters, and `beside` them what stands in it of
    the first parameter of each kind, and of the group."""

    kinds: list[Kind]
    beside: ParamGroup

    @classmethod
    def of(cls, group: ParamGroup) -> "KindsOfGroup":
        first: dict[Kind, int] = {}
        for i, param in enumerate(group["params"]):
            first.setdefault(Kind.of(param, group["logical"][i] if "logical" in group else None), i)
        return cls(list(first), part_of(group, list(first.values())))

    def with_params(self, params: list[nn.Parameter]) -> ParamGroup:
        """The group over stand-ins for its kinds."""
        return {**{key: list(v) if isinstance(v, list) else v for key, v in self.beside.items()}, "params": params}

    def sharded(self) -> "KindsOfGroup":
        """The part of it that is sharded."""
        numbers = [i for i, kind in enumerate(self.kinds) if kind.sharded]
        return KindsOfGroup([self.kinds[i] for i in numbers], part_of(self.beside, numbers))


def every_kind(groups: Iterable[KindsOfGroup]) -> list[Kind]:
    return [kind for group in groups for kind in group.kinds]


def try_step(build: Build, groups: list[KindsOfGroup]) -> str | None:
    """What goes wrong, in words, when the optimizer from `build` steps stand-ins in their own dtype; None: nothing.

    Collective if the optimizer's step is.
    """
    return _problem(groups, lambda: _stepped(build, groups))


def try_step_without_values(build: Build, groups: list[KindsOfGroup]) -> str | None:
    """The same for parameters that have no values: one of each kind is stepped, at its own size."""

    def step() -> None:
        params = [[stand_in(torch.empty_like(p), torch.empty_like(p)) for p in g.beside["params"]] for g in groups]
        build([group.with_params(own) for group, own in zip(groups, params, strict=True)]).step()

    return _problem(groups, step)


def _problem(groups: list[KindsOfGroup], step: Callable[[], Any]) -> str | None:
    try:
        with undisturbed(every_kind(groups)[0].device):
            step()
    except ArgumentsRefused as error:
        return f"refuses these options: {error}"
    except Exception as error:
        first, *others = dict.fromkeys(map(str, every_kind(groups)))
        more = f" and {len(others)} other kind(s)" if others else ""
        return f"cannot make a step on {first}{more}: {shorten(one_line(error), 240).rstrip('.')}"
    return None


def compare_shards(build: Build, plainest: Build, groups: list[KindsOfGroup]) -> str | None:
    """What is wrong, in words, if a shard's step differs, in float64, from the step of `plainest` on the whole tensor.

    An optimizer that takes the norm of a shard for that of the parameter trains wrong with a plausible loss, and the
    number that torch's DTensor returns for a norm (`.norm().item()`) is the shard's. Optimizers that draw random
    numbers or do not accept float64 are not compared. Collective if the optimizer's step is.
    """
    groups = [part for group in groups if (part := group.sharded()).kinds]
    kinds = every_kind(groups)
    if not kinds:
        return None
    with undisturbed(kinds[0].device):
        try:
            before = _random_state(kinds[0].device)
            expected = _stepped(plainest, groups, torch.float64, whole=True)
            if not torch.equal(before, _random_state(kinds[0].device)):
                return None
            stepped = _stepped(build, groups, torch.float64)
        except Exception:
            return None
    for seed, (kind, got, want) in enumerate(zip(kinds, stepped, expected, strict=True)):
        got, want, start = (_local(t) for t in (got, kind.place(want), kind.place(drawn(kind, seed, 0))))
        step, off = float((want - start).norm()), float((got - want).norm())
        if isfinite(step) and not off <= OFF * step:
            return (
                f"makes a different step on a shard than on the whole, off by {off / max(step, 1e-300):.0%} for "
                f"{kind}, so it would train wrong (unless its class declares numerics = 'own')"
            )
    return None


def _random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state()


def _stepped(
    build: Build, groups: list[KindsOfGroup], dtype: torch.dtype | None = None, whole: bool = False
) -> list[Tensor]:
    """The stand-ins of all kinds after some steps. whole: as plain, undivided tensors."""
    kinds = every_kind(groups)

    def placed(seed: int, step: int) -> Tensor:
        kind = kinds[seed]
        value = drawn(kind, seed, step).to(dtype or kind.dtype)
        return value.to(kind.device) if whole else kind.place(value)

    params = [stand_in(placed(seed, 0), placed(seed, 1)) for seed in range(len(kinds))]
    rest = iter(params)
    try:
        optimizer = build([group.with_params([next(rest) for _ in group.kinds]) for group in groups])
    except Exception as error:
        raise ArgumentsRefused(one_line(error)) from error
    for step in range(1, STEPS + 1):
        for seed, param in enumerate(params):
            param.grad = placed(seed, step)
        optimizer.step()
    return [param.detach() for param in params]


def drawn(kind: Kind, seed: int, step: int) -> Tensor:
    """A parameter (step 0) or a gradient, the same on all ranks. One grows along each dim and the other shrinks, so
    that no shard is like the whole."""
    value = torch.randn(kind.shape, generator=torch.Generator().manual_seed(100 * seed + step), dtype=torch.float64)
    for dim, size in enumerate(kind.shape):
        growth = torch.linspace(1, 3, size, dtype=torch.float64)
        value *= (growth.flip(0) if step else growth).view(-1, *[1] * (len(kind.shape) - dim - 1))
    return value if step else 0.1 * value


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
