"""Counts the collectives of a piece of code by kind and mesh axis."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plait import ModelSpec
from plait_testing.torch_internals import TorchDispatchMode, schema, tree_leaves

if TYPE_CHECKING:
    from plait import Mesh

_KINDS = {
    "reduce_scatter": r"reduce_?scatter",
    "all_gather": r"all_?gather",
    "all_reduce": r"all_?reduce",
    "all_to_all": r"all_?to_?all",
    "broadcast": r"broadcast",
    "barrier": r"barrier",
    "gather": r"gather",
    "scatter": r"scatter",
    "send": r"send",
    "recv": r"recv",
}


@attrs.frozen
class Collective:
    """`count` operations `op` over mesh axis `axis` (axes that sum gradients together are "data").

    op:      all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send, recv.
    axis:    its name, or "data".
    count:   how many there are.
    elements: how many elements they move in total, on one rank: of each operation its input or its result, whichever is
             larger. None: not declared.
    """

    op: str
    axis: str
    count: int
    elements: int | None = None

    def __str__(self) -> str:
        moved = "" if self.elements is None else f" of {self.elements:,} elements"
        return f"{self.count} {self.op} over {self.axis}{moved}"


@attrs.frozen
class Size:
    """Sizes of a model, or of one of its blocks, for declaring collectives.

    elements: elements of all parameters. tensors: number of parameters. blocks: the same of each block.
    uses: the same, but a tied parameter counts for every module that has it.
    tokens: of a global batch. dim: the width of the residual stream.
    """

    elements: int
    tensors: int
    blocks: tuple["Size", ...] = ()
    uses: "Size | None" = None
    tokens: int = 0
    dim: int = 0

    @classmethod
    def of(cls, model: nn.Module, spec: ModelSpec, tokens: int) -> "Size":
        params = dict(model.named_parameters())
        widths = [
            n for fqn, p in params.items() for n, a in zip(p.shape, spec.axes_of(fqn), strict=True) if a == "embed"
        ]
        blocks = tuple(_of_parameters(block.parameters()) for block in spec.blocks_of(model).values())
        plain = _of_parameters(params.values())
        uses = _of_parameters(p for _, p in model.named_parameters(remove_duplicate=False))
        return cls(plain.elements, plain.tensors, blocks, uses, tokens, widths[0] if widths else 0)


def _of_parameters(parameters: Iterable[Tensor]) -> Size:
    found = list(parameters)
    return Size(sum(p.numel() for p in found), len(found))


class Counting(TorchDispatchMode):
    """Counts the collectives that this rank takes part in: `with Counting(mesh) as counting:`, then
    `counting.found()`.

    mesh: whose axes name the groups.
    """

    def __init__(self, mesh: "Mesh") -> None:
        super().__init__()
        self._axes = mesh.axes_by_group(joined=True)
        self._seen: dict[tuple[str, str], list[int]] = {}

    def found(self) -> list[Collective]:
        """What was counted: one for each operation and axis, in their order."""
        return [Collective(op, axis, len(seen), sum(seen)) for (op, axis), seen in sorted(self._seen.items())]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # what it moves is counted when it has become operations on its parts
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            name = schema(func).name.partition("::")[2]
            kind = next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name)), None)
            if kind is not None:
                moved = [sum(t.numel() for t in tree_leaves(a) if isinstance(t, Tensor)) for a in (*args, result)]
                self._seen.setdefault((kind, self._axis(args)), []).append(max(moved))
        return result

    def _axis(self, args: Iterable[Any]) -> str:
        for arg in args:
            name = arg if isinstance(arg, str) else ""
            if isinstance(arg, torch.ScriptObject):
                try:
                    name = dist.ProcessGroup.unbox(arg).group_name
                except RuntimeError:  # another kind of object, such as the operation
                    continue
            if name in self._axes:
                return self._axes[name]
        return "an unknown group"
