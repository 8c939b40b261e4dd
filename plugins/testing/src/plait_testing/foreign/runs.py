"""One run of a comparison: the model on these ranks, or in one process, and everything that it computed."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from plait import PlaitError, whole_tensor
from plait_testing.finding import bitwise
from plait_testing.foreign import batches
from plait_testing.foreign.held import Held, check_names, plain_name
from plait_testing.foreign.recomputed import recompute
from plait_testing.foreign.saved import save_and_load
from plait_testing.foreign.subject import Comparison, Parallel, Share
from plait_testing.widened import Widened

SEED = 20


@attrs.frozen
class Variant:
    """One question: what is different from plain steps. steps: of the optimizer; 0: gradients of one batch alone."""

    key: str
    steps: int = 0
    parts: int = 1
    unequal: bool = False
    packed: bool = False
    recomputed: bool = False
    frozen: bool = False
    saved: bool = False


@attrs.define
class Ran:
    """What a run computed on one rank. Tensors are whole ones by name; of replicas this rank's own.

    initial, final: parameters. gradients: of the first batch, before clipping; clipped: after it. losses, norms: of
    every step; a loss is None on a rank that computes none. restored: parameters after loading, and `later` those
    after one more step. lies: how each parameter lies. order: modules in the order of forward. unasked: why a variant
    could not be run. unclipped, unkept: why clipping, or saving, could not be asked. unsaved: what saving raised.
    """

    initial: dict[str, Tensor] = attrs.Factory(dict)
    gradients: dict[str, Tensor] = attrs.Factory(dict)
    clipped: dict[str, Tensor] = attrs.Factory(dict)
    losses: list[float | None] = attrs.Factory(list)
    norms: list[float] = attrs.Factory(list)
    final: dict[str, Tensor] = attrs.Factory(dict)
    restored: dict[str, Tensor] = attrs.Factory(dict)
    later: dict[str, Tensor] = attrs.Factory(dict)
    lies: dict[str, str] = attrs.Factory(dict)
    order: list[str] = attrs.Factory(list)
    unasked: str = ""
    unclipped: str = ""
    unkept: str = ""
    unsaved: str = ""


class Side:
    """The model of one side, ready for steps: under its parallel code on all ranks that call this together, or plain in
    one process. expected: the values that its parameters must have; None: they are drawn."""

    def __init__(
        self, comparison: Comparison, variant: Variant, expected: Mapping[str, Tensor] | None, ranks: bool
    ) -> None:
        self.comparison, self.variant, self.ran, self.ranks = comparison, variant, Ran(), ranks
        self.rank = dist.get_rank() if self.ranks else 0
        mesh = tuple(comparison.mesh.values())
        self.mesh = init_device_mesh("cpu", mesh, mesh_dim_names=tuple(comparison.mesh)) if self.ranks else None
        self.place(expected)

    def place(self, expected: Mapping[str, Tensor] | None) -> None:
        """Build the model and parallelise it. With `expected` it gets these values."""
        torch.manual_seed(SEED)
        model = self.comparison.build().to(getattr(torch, self.comparison.dtype))
        frozen = _frozen(self.comparison, model) if self.variant.frozen else set()
        if expected is not None:
            _copy_into(model, expected)
        _freeze(model.named_parameters(), frozen)
        made: Any = self.comparison.parallelize(model, self.mesh) if self.ranks else model
        if not isinstance(made, Parallel | nn.Module):
            raise PlaitError(
                f"parallelize must return the parallel model, or a Parallel of it, and returned {type(made).__name__}"
            ).at("parallelize")
        self.parallel = made if isinstance(made, Parallel) else Parallel(made)
        self.held = Held(self.parallel, self.mesh)
        _freeze(self.held.parameters(), frozen)
        if self.variant.recomputed and self.ranks:
            if self.comparison.recompute is not None:
                self.comparison.recompute(self.parallel.model)
            elif not recompute(self.parallel.model):
                self.ran.unasked = "the model has no list of modules to recompute; give recompute="
        self.ran.initial = self.held.values()
        if expected is not None:
            check_names(self.ran.initial, expected)
            if not bitwise("", self.ran.initial, expected).fine:
                self.held.fill(expected)
                self.ran.initial = self.held.values()
        self.ran.lies = self.held.lies()
        self.parallel.model.train()
        if self.parallel.optimizer is None and (self.variant.steps or self.variant.saved):
            trains = [p for p in self.parallel.model.parameters() if p.requires_grad]
            self.parallel.optimizer = self.comparison.optimizer(trains)

    def batch(self, step: int) -> dict[str, Tensor]:
        made = self.comparison.packed if self.variant.packed else self.comparison.batch
        assert made is not None
        found = dict(made(step))
        dtype = getattr(torch, self.comparison.dtype)
        found = {key: t.to(dtype) if t.is_floating_point() else t for key, t in found.items()}
        return batches.unequal(found) if self.variant.unequal else found

    def shares(self, step: int) -> list[Share]:
        batch = self.batch(step)
        if self.ranks:
            return batches.shares(self.comparison, batch, self.rank, self.variant.parts)
        if self.variant.packed:
            return list(batches.apart(batch, self.comparison.positions))
        return [batches.whole(batch)]

    def backward(self, shares: Sequence[Share]) -> float | None:
        """Forward and backward of micro-batches; returns the sum of their losses."""
        if self.parallel.run is not None:
            loss = self.parallel.run(shares)
            return None if loss is None else float(loss)
        summed = 0.0
        for share in shares:
            loss = self.comparison.loss(self.parallel.model, share)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise PlaitError("loss must return a tensor with one number, on which backward is called").at("loss")
            (self.parallel.backward or Tensor.backward)(loss)
            summed += float(whole_tensor(loss.detach()))
        return summed

    def clip(self) -> None:
        model, largest = self.parallel.model, self.comparison.max_norm
        if "norm" in self.comparison.off:
            return
        if self.parallel.clip is None and self.parallel.gradients is not None:
            said = "Parallel(gradients=...) wants clip= too; or switch the question off: off={'norm': reason}"
            raise PlaitError(said).at("clip")
        try:
            if self.parallel.clip is None and self.parallel.shards:
                raise NotImplementedError("only the framework knows the norm of what it keeps in its own way")
            if self.parallel.clip is not None:
                norm = self.parallel.clip(largest)
            elif self.ranks and callable(own := getattr(model, "clip_grad_norm_", None)):
                norm = own(largest)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), largest)
        except RuntimeError as error:  # also NotImplementedError
            said = str(error).splitlines()[0].partition(", need to")[0].partition(", but got")[0]
            self.ran.unclipped = f"{said}; give Parallel(clip=...)"
            norm = self._clip_by_whole_gradients(largest)
        self.ran.norms.append(float(whole_tensor(norm) if isinstance(norm, Tensor) else norm))

    def _clip_by_whole_gradients(self, largest: float) -> float:
        """Where torch refuses: so that the questions after it can be asked."""
        norm = math.hypot(*(float(g.double().norm()) for g in self.held.gradients().values()))
        for _, param in self.held.parameters():
            if param.grad is not None and norm > largest:
                param.grad.mul_(largest / (norm + 1e-6))
        return norm

    def step(self, step: int) -> None:
        self.parallel.optimizer.zero_grad()
        self.ran.losses.append(self.backward(self.shares(step)))
        if step == 0:
            self.ran.gradients = self.held.gradients()
        self.clip()
        if step == 0:
            self.ran.clipped = self.held.gradients()
        self.parallel.optimizer.step()


def run(
    comparison: Comparison,
    variant: Variant,
    expected: Mapping[str, Tensor] | None = None,
    ranks: bool = False,
    folder: Path | None = None,
    look: Callable[[nn.Module], Any] | None = None,
) -> Ran:
    """What the ranks that call this together compute, or one process. expected: initial values; None: they are drawn.
    folder: for what is saved. look: called with the model before the first step."""
    with Widened() if comparison.dtype == "float64" else torch.enable_grad():
        side = Side(comparison, variant, expected, ranks)
        ran = side.ran
        if look is not None:
            look(side.parallel.model)
        watch = None if side.ranks else _Order(side.parallel.model)
        if not variant.steps:
            ran.losses.append(side.backward(side.shares(0)))
            ran.gradients = side.held.gradients()
        for step in range(variant.steps):
            side.step(step)
        if watch is not None:
            ran.order = watch.done()
        if variant.steps:
            ran.final = side.held.values()
        if variant.saved:
            initial = ran.initial
            if side.ranks:
                save_and_load(side, str(folder))
            ran.initial = initial  # a model that is loaded into begins with others
            if ran.unsaved or ran.unkept:
                return ran
            side.step(variant.steps)
            ran.later = side.held.values()
            ran.losses.pop()
        return ran


class _Order:
    """The modules of a model, in the order in which forward first enters them."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, None] = {}
        self.hooks = [
            module.register_forward_pre_hook(lambda *_, name=name: self.seen.setdefault(name))
            for name, module in model.named_modules()
        ]

    def done(self) -> list[str]:
        for hook in self.hooks:
            hook.remove()
        return [plain_name(f"{name}.").removesuffix(".") for name in self.seen]


def in_order(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Parameters in the order in which forward enters the modules that own them; those of others last."""
    place = {module: i for i, module in enumerate(order)}
    return sorted(names, key=lambda name: place.get(name.rpartition(".")[0], len(place)))


def check_no_chance(comparison: Comparison) -> None:
    """Raises PlaitError if one process computes another loss the second time: dropout, for example."""
    side = Side(comparison, Variant("twice"), None, ranks=False)
    losses = []
    with torch.no_grad():
        for seed in (0, 1):
            torch.manual_seed(seed)
            losses.append(float(comparison.loss(side.parallel.model, side.shares(0)[0])))
    if losses[0] != losses[1] and all(map(math.isfinite, losses)):
        drops = [name for name, module in side.parallel.model.named_modules() if "Dropout" in type(module).__name__]
        named = f"; {', '.join(drops[:5])} may be why" if drops else ""
        raise PlaitError(
            f"one process computes another loss the second time, {losses[0]:.6g} and {losses[1]:.6g}: switch off "
            f"dropout and other random values{named}"
        ).at("build")


def _copy_into(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            if not param.is_meta and name in values and values[name].shape == param.shape:
                param.copy_(values[name])


def _frozen(comparison: Comparison, model: nn.Module) -> set[str]:
    names = [name for name, _ in model.named_parameters()]
    half = {*itertools.islice(names, len(names) // 2)}
    return {n for n in names if comparison.frozen(n)} if comparison.frozen else half


def _freeze(parameters: Iterable[tuple[str, nn.Parameter]], frozen: set[str]) -> None:
    for name, param in parameters:
        if name in frozen and param.requires_grad:
            param.requires_grad_(False)
