"""Where activations first differ: what every module returned on each rank, beside what it returned in one process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plait_testing.foreign.held import copied, plain_name
from plait_testing.foreign.subject import Comparison
from plait_testing.torch_internals import tree_leaves

Outputs = dict[str, Tensor]


@attrs.frozen
class Diverged:
    """module: the first whose output differs, and its class; before: the last module that agrees before it, or "".
    rank: the first rank where it differs. off: how far, relative."""

    module: str
    kind: str
    before: str
    rank: int
    off: float


class Looking:
    """Keeps the first output of each module, in the order in which they end. `look` is called with the model."""

    def __init__(self) -> None:
        self.outputs: Outputs = {}
        self.kinds: dict[str, str] = {}

    def look(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            module.register_forward_hook(self._keeping(plain_name(f"{name}.").removesuffix(".")))

    def _keeping(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, _: Any, output: Any) -> None:
            found = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
            if name not in self.outputs and found is not None and found.is_floating_point():
                self.outputs[name] = copied(found) if isinstance(found, DTensor) else found.detach().cpu().clone()
                self.kinds[name] = type(module).__name__

        return keep


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
        fine = _agrees(comparison, own, right, within)
        if fine:
            before = name
        elif fine is False:
            rank, off = _first(comparison, own, right, within)
            return Diverged(name, kinds[name], before, rank, off)
    return None


def _rows(comparison: Comparison, right: Tensor, rank: int) -> Tensor:
    ranks = comparison.data_ranks
    if ranks == 1 or right.dim() == 0 or right.shape[0] % ranks:
        return right
    return right.chunk(ranks)[comparison.data_rank(rank)]


def _agrees(comparison: Comparison, found: Sequence[Tensor], right: Tensor, within: float) -> bool | None:
    """None: the shapes say nothing."""
    known = False
    wanted = [_rows(comparison, right, rank) for rank in range(len(found))]
    for forms in _forms(comparison, found):
        known |= all(a.shape == b.shape for a, b in zip(forms, wanted, strict=True))
        if all(_near(a, b, within) for a, b in zip(forms, wanted, strict=True)):
            return True
    for axis, size in comparison.mesh.items():  # a part that every rank along the axis has of what one process has
        for dim in range(right.dim()) if size > 1 else ():
            if all(w.shape[dim] % size == 0 for w in wanted if w.dim() > dim):
                parts = [w.chunk(size, dim)[comparison.place(r)[axis]] for r, w in enumerate(wanted)]
                known |= all(a.shape == b.shape for a, b in zip(found, parts, strict=True))
                if all(_near(a, b, within) for a, b in zip(found, parts, strict=True)):
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


def _first(comparison: Comparison, found: Sequence[Tensor], right: Tensor, within: float) -> tuple[int, float]:
    for rank, each in enumerate(found):
        wanted = _rows(comparison, right, rank)
        if each.shape == wanted.shape and not _near(each, wanted, within):
            return rank, float((each.double() - wanted.double()).norm() / max(float(wanted.double().norm()), 1e-30))
    return 0, float("nan")


def _near(a: Tensor, b: Tensor, within: float) -> bool:
    return a.shape == b.shape and float((a.double() - b.double()).norm()) <= within * float(b.double().norm())
