"""Where activations first differ: what every module returned on each rank, beside what it returned in one process."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from plait_testing.foreign.held import copied, plain_name
from plait_testing.foreign.subject import Comparison
from plait_testing.torch_internals import tree_leaves

Outputs = dict[str, Tensor]
GETS, RETURNS = "gets", "returns"
Spot = tuple[str, str, int]  # a module, GETS or RETURNS, and which of its tensors


@attrs.frozen
class Diverged:
    """module: the first whose output differs, and its class; before: the last module that agrees before it, or "".
    rank: the first rank where it differs. off: how far, relative."""

    module: str
    kind: str
    before: str
    rank: int
    off: float


@attrs.define
class Looked:
    """What one process, or a rank, saw of modules. values: what they got and returned; gradients: those of `values`, in
    the order of backward; kinds: the classes of modules. All tensors are whole if they are DTensors."""

    values: dict[Spot, Tensor] = attrs.Factory(dict)
    gradients: dict[Spot, Tensor] = attrs.Factory(dict)
    kinds: dict[str, str] = attrs.Factory(dict)

    def outputs(self) -> Outputs:
        """The first tensor that each module returned, in the order in which they ended."""
        found: Outputs = {}
        for (module, side, _), value in self.values.items():
            if side == RETURNS:
                found.setdefault(module, value)
        return found


class Looking:
    """Keeps what each module gets and returns in its first call, with the gradients. `look` is called with the model,
    `done` after backward."""

    def __init__(self) -> None:
        self.looked = Looked()
        self.keys: dict[int, tuple[Tensor, list[Spot]]] = {}  # by id: what a module returns is what the next one gets

    def look(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            plain = plain_name(f"{name}.").removesuffix(".")
            self.looked.kinds.setdefault(plain, type(module).__name__)
            module.register_forward_pre_hook(lambda _, *got, at=plain: self._keep(at, GETS, got), with_kwargs=True)
            module.register_forward_hook(lambda module, got, returned, at=plain: self._keep(at, RETURNS, returned))

    def done(self) -> Looked:
        """Collective, if modules return DTensors."""
        gradients = self.looked.gradients
        whole = {key: copied(gradients[key]) for key in sorted(gradients)}  # in one order on all ranks
        self.looked.gradients = {key: whole[key] for key in gradients}
        return self.looked

    def _keep(self, module: str, side: str, tensors: Any) -> None:
        leaves = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
        for place, leaf in enumerate(leaves):
            key = (module, side, place)
            if key in self.looked.values or not leaf.is_floating_point():
                continue
            self.looked.values[key] = copied(leaf)
            if leaf.requires_grad:
                _, keys = self.keys.setdefault(id(leaf), (leaf, []))
                keys.append(key)
                if len(keys) == 1:
                    leaf.register_hook(lambda grad, keys=keys: self._keep_gradient(keys, grad))

    def _keep_gradient(self, keys: Sequence[Spot], grad: Tensor) -> None:
        for key in reversed(keys):  # the last that got it is the first in backward
            self.looked.gradients[key] = grad.detach().clone()


def first_apart(
    comparison: Comparison, one: Outputs, kinds: Mapping[str, str], ranks: Sequence[Outputs], within: float
) -> Diverged | None:
    """The first module, in the order of one process, whose output is not that of one process in any form: whole, a part
    along a dim, or a summand. None if there is none, or if outputs have other shapes."""
    before = ""
    for name, right in one.items():
        found = [outputs.get(name) for outputs in ranks]
        if any(each is None for each in found):
            continue
        own = [each for each in found if each is not None]
        fine = agrees(comparison, own, right, within)
        if fine:
            before = name
        elif fine is False:
            rank, off = rank_and_distance(comparison, own, right, within)
            return Diverged(name, kinds[name], before, rank, off)
    return None


def rows(comparison: Comparison, right: Tensor, rank: int) -> Tensor:
    ranks = comparison.data_ranks
    if ranks == 1 or right.dim() == 0 or right.shape[0] % ranks:
        return right
    return right.chunk(ranks)[comparison.data_rank(rank)]


def agrees(comparison: Comparison, found: Sequence[Tensor], right: Tensor, within: float) -> bool | None:
    """None: the shapes say nothing."""
    known = False
    wanted = [rows(comparison, right, rank) for rank in range(len(found))]
    for forms in _forms(comparison, found):
        known |= all(a.shape == b.shape for a, b in zip(forms, wanted, strict=True))
        if all(near(a, b, within) for a, b in zip(forms, wanted, strict=True)):
            return True
    for axis, size in comparison.mesh.items():  # a part that every rank along the axis has of what one process has
        for dim in range(right.dim()) if size > 1 else ():
            if all(w.shape[dim] % size == 0 for w in wanted if w.dim() > dim):
                parts = [w.chunk(size, dim)[comparison.place(r)[axis]] for r, w in enumerate(wanted)]
                known |= all(a.shape == b.shape for a, b in zip(found, parts, strict=True))
                if all(near(a, b, within) for a, b in zip(found, parts, strict=True)):
                    return True
    return False if known else None


def _forms(comparison: Comparison, found: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """As the ranks have it, and summed over each axis."""
    yield found
    for axis, size in comparison.mesh.items():
        if size > 1 and axis not in comparison.data_axes and len({each.shape for each in found}) == 1:
            summed = []
            for rank in range(len(found)):
                place = comparison.place(rank)
                group = [r for r in range(len(found)) if {**comparison.place(r), axis: 0} == {**place, axis: 0}]
                summed.append(torch.stack([found[r] for r in group]).sum(0))
            yield summed


def rank_and_distance(
    comparison: Comparison, found: Sequence[Tensor], right: Tensor, within: float
) -> tuple[int, float]:
    """The first rank whose tensor is not `right`, and how far it is off, relative."""
    for rank, each in enumerate(found):
        wanted = rows(comparison, right, rank)
        if each.shape == wanted.shape and not near(each, wanted, within):
            return rank, float((each.double() - wanted.double()).norm() / max(float(wanted.double().norm()), 1e-30))
    return 0, float("nan")


def near(a: Tensor, b: Tensor, within: float) -> bool:
    return a.shape == b.shape and float((a.double() - b.double()).norm()) <= within * float(b.double().norm())
