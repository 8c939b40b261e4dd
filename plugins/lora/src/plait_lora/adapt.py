"""Freezes a model and adds adapters to the matrices in its blocks that have chosen logical axes."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from plait import ModelSpec, Packed, PlaitError, UnequalParts, mix_in, transform_param
from plait_lora.linear import Adapted, SeesAdapter
from plait_lora.names import pair
from plait_lora.options import LoraOptions

KEY = "strategy.lora"
LOW_RANK = "low_rank"  # the logical axis between an adapter's two matrices
Names = tuple[str | None, ...]  # of the axes of a matrix


@attrs.frozen
class Uniform:
    """Draws between -bound and bound. It compares by value, as two specs are compared."""

    bound: float

    def __call__(self, tensor: Tensor, generator: Generator | None = None) -> Tensor:
        return tensor.uniform_(-self.bound, self.bound, generator=generator)


def zeros(tensor: Tensor, generator: Generator | None = None) -> Tensor:
    return tensor.zero_()


@attrs.frozen
class AdapterFlops:
    """Operations per token: `whole`, those of training the whole model, without the gradients of its matrices, and
    those of adapters with `adapters` elements that a token is multiplied with."""

    whole: Callable[[int], int]
    adapters: int

    def __call__(self, seq_len: int) -> int:
        matrices = self.whole(0)
        return self.whole(seq_len) - matrices // 3 + 6 * self.adapters


def adapt(options: LoraOptions, model: nn.Module, spec: ModelSpec) -> ModelSpec:
    """Freeze `model` and add adapters to it, in place; returns the spec with their axes and initial values.

    A is drawn as the paper's code does (Kaiming uniform with a = sqrt 5: up to 1 / sqrt(D)), B is 0.
    Raises PlaitError if no matrix, or one that cannot have an adapter, has a target's axis, or the rank is too high, or
    if adapters would be exported alone, whose files are those of a larger model.
    """
    if not options.merge and getattr(model, "passed_on", lambda: None)() is not None:
        raise PlaitError(
            f"{KEY}.merge=false exports adapters alone, which name modules of the part that trains, and the weights of "
            f"this model are those of a larger one, with other names; {KEY}.merge=true exports the larger one"
        ).at(f"{KEY}.merge", False, fits=(True,))
    matrices = dict(_matrices(model, spec))
    chosen = [fqn for fqn, axes in matrices.items() if set(axes) & set(options.targets)]
    _check(options, model, chosen, matrices)
    stacks: dict[str, str] = {}
    model.requires_grad_(False)
    added: dict[str, tuple[str | Packed | UnequalParts | None, ...]] = {}
    init: dict[str, Any] = {}
    for fqn in chosen:
        owner, _, name = fqn.rpartition(".")
        module, names, axes = model.get_submodule(owner), pair(fqn), spec.axes_of(fqn)
        weight: Any = module.get_parameter(name)
        stack, (rows, columns) = weight.shape[:-2], weight.shape[-2:]
        made = {names[0]: (*stack, options.rank, columns), names[1]: (*stack, rows, options.rank)}
        for its, shape in made.items():
            param = nn.Parameter(torch.empty(shape, device="meta", dtype=weight.dtype))
            module.register_parameter(its.rpartition(".")[2], param)
        _attach(module, fqn, name, options.scale)
        if stack:
            stacks[owner] = fqn
        its_axes = (*axes[:-2], LOW_RANK, axes[-1]), (*axes[:-1], LOW_RANK)
        for each, of, fill in zip(names, its_axes, (Uniform(1 / math.sqrt(columns)), zeros), strict=True):
            pattern = _in_blocks(each, spec)
            fits = added.get(pattern, of) == of and init.get(pattern, fill) == fill
            key = pattern if fits else each  # blocks may differ
            if fits:
                added[key], init[key] = of, fill
            else:  # before the pattern
                added, init = {key: of} | added, {key: fill} | init
    for owner, fqn in stacks.items():
        _try(options, model.get_submodule(owner), fqn, matrices)
    flops = spec.flops and AdapterFlops(spec.flops, _multiplied(model, spec, chosen, matrices))
    return attrs.evolve(spec, axes=added | dict(spec.axes), init=init | dict(spec.init), flops=flops)


def _multiplied(model: nn.Module, spec: ModelSpec, chosen: list[str], matrices: dict[str, Names]) -> int:
    """The elements of adapters that a token is multiplied with: of experts', those of the experts that it visits."""
    routers, blocks, total = spec.routers_of(model), list(spec.blocks_of(model)), 0.0
    for fqn in chosen:
        elements = sum(model.get_parameter(each).numel() for each in pair(fqn))
        if matrices[fqn][0] == "experts":
            block = next(b for b in blocks if fqn.startswith(f"{b}."))
            visits = next((getattr(r, "top_k", 1) for name, r in routers.items() if name.startswith(f"{block}.")), 1)
            total += elements * visits / model.get_parameter(fqn).shape[0]
        else:
            total += elements
    return round(total)


def _matrices(model: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, Names]]:
    """FQN and names of the axes of each matrix, or stack of matrices, in a block; a tied one once."""
    blocks = tuple(f"{block}." for block in spec.blocks_of(model))
    for fqn, param in model.named_parameters():
        axes = spec.names_of(fqn)
        if param.dim() > 1 + ("experts" in axes) and fqn.startswith(blocks):  # experts have a bias each
            yield fqn, axes


def _check(options: LoraOptions, model: nn.Module, chosen: list[str], matrices: dict[str, Names]) -> None:
    known = sorted(_axes(matrices.values()))
    for target in options.targets or ["nothing"]:
        if not any(target in axes for axes in matrices.values()):
            raise PlaitError(
                f"{KEY}.targets={options.targets}: no matrix in a block of this model has the logical axis {target!r}; "
                f"its matrices have {', '.join([*known, 'embed'])}, and nearly all have embed"
            ).at(f"{KEY}.targets", options.targets, fits=known)
    for fqn in chosen:
        owner, _, name = fqn.rpartition(".")
        module = model.get_submodule(owner)
        stacked = matrices[fqn][0] == "experts" and len(matrices[fqn]) == 3
        if not stacked and (name != "weight" or type(module).forward is not nn.Linear.forward):
            raise PlaitError(
                f"{KEY}.targets={options.targets} chooses {fqn!r} {matrices[fqn]}, which belongs to a "
                f"{type(module).__name__}; an adapter needs an nn.Linear, or experts that multiply by grouped_linear; "
                "choose other targets"
            ).at(f"{KEY}.targets", options.targets, fits=known)
    largest = {fqn: min(model.get_parameter(fqn).shape[-2:]) for fqn in chosen}
    least = min(largest, key=largest.__getitem__)
    if options.rank > largest[least]:
        raise PlaitError(
            f"{KEY}.rank={options.rank} is higher than that of {least!r}, which has {largest[least]} rows or columns; "
            f"it may be up to {largest[least]}"
        ).at(f"{KEY}.rank", options.rank, fits=f"at most {largest[least]}")


def _axes(matrices: Iterable[Names]) -> set[str]:
    """What a target may be, of these matrices: `embed` would choose nearly all, and `experts` whole stacks."""
    return {axis for its in matrices for axis in its if axis is not None} - {"embed", "experts"}


def _try(options: LoraOptions, module: nn.Module, fqn: str, matrices: dict[str, Names]) -> None:
    """Run the experts once, on meta: raises PlaitError if they multiply by anything but `grouped_linear`."""
    held = {name: torch.empty_like(param, device="meta") for name, param in module.named_parameters()}
    weight = held[fqn.rpartition(".")[2]]
    width = next((n for n, axis in zip(weight.shape, matrices[fqn], strict=True) if axis == "embed"), 1)
    counts = torch.empty(weight.shape[0], dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            functional_call(module, held, (weight.new_empty(2, width), counts))
    except Exception as error:
        others = sorted(_axes(its for its in matrices.values() if its[0] != "experts") - _axes([matrices[fqn]]))
        raise PlaitError(
            f"{KEY}.targets={options.targets} chooses {fqn!r}, a stack of experts of a {type(module).__name__}, which "
            "cannot have an adapter: it is not called as forward(rows, counts), or multiplies by something other than "
            f"plait.ops.grouped_linear; targets that only other matrices have: {', '.join(others) or 'none'}"
        ).at(f"{KEY}.targets", options.targets, fits=others) from error


def _attach(module: nn.Module, fqn: str, name: str, scale: float) -> None:
    """Have `module` compute with the adapter of its parameter `name`."""
    if name == "weight" and isinstance(module, nn.Linear):
        linear: Any = module
        linear.lora_scale = scale
        mix_in(module, Adapted)
        return
    down, up = (each.rpartition(".")[2] for each in pair(fqn))
    transform_param(module, name, SeesAdapter(module, (down, up), scale))


def _in_blocks(fqn: str, spec: ModelSpec) -> str:
    """`fqn` with the pattern of its block in the place of the block's name: one entry serves all blocks."""
    names = fqn.split(".")
    for pattern in spec.blocks:
        pieces = pattern.split(".")
        if len(pieces) < len(names) and all(p in ("*", n) for p, n in zip(pieces, names, strict=False)):
            return ".".join([*pieces, *names[len(pieces) :]])
    return fqn
