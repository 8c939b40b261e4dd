"""A tensor in a file of weights that is a part of a parameter."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from plait.contract.errors import PlaitError

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen
class WeightPart:
    """A box of the parameter `fqn`, whose dims may be in another order in the file.

    fqn: of the parameter.
    start, size: of the box, per dim of the parameter.
    dims: those of the parameter that the tensor has, in its order; a dim in which the box has size 1 may be left out.
    """

    fqn: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def whole(cls, fqn: str, shape: Sequence[int]) -> "WeightPart":
        """All of the parameter `fqn` with this shape."""
        return cls(fqn, (0,) * len(shape), tuple(shape), tuple(range(len(shape))))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        return tuple(self.size[dim] for dim in self.dims)

    def of(self, parameter: "Tensor") -> "Tensor":
        """The tensor of the file: a view of the whole `parameter`."""
        box = parameter[tuple(slice(at, at + size) for at, size in zip(self.start, self.size, strict=True))]
        return box.permute((*self.dims, *self._left_out())).reshape(self.shape)

    def as_in_parameter(self, tensor: "Tensor") -> "Tensor":
        """`tensor`, a piece of the tensor of the file, with the dims of the parameter."""
        order = (*self.dims, *self._left_out())
        wide = tensor.reshape(*tensor.shape, *(1 for _ in self._left_out()))
        return wide.permute(tuple(order.index(dim) for dim in range(len(order))))

    def _left_out(self) -> list[int]:
        return [dim for dim in range(len(self.size)) if dim not in self.dims]


def weight_parts(model: object) -> Mapping[str, WeightPart]:
    """What the model says of the names in its files; empty if it has no `weight_parts`: they are its parameters'."""
    return getattr(model, "weight_parts", dict)()


def parts_by_fqn(
    parameters: Mapping[str, Sequence[int]], parts: Mapping[str, WeightPart]
) -> dict[str, dict[str, WeightPart]]:
    """FQN -> the tensors of files that make up the parameter, by their names; one of its own name if `parts` has none.

    parameters: FQN -> shape. parts: name in the files -> part. Raises PlaitError for a parameter that its parts do not
    cover.
    """
    parts_of: dict[str, dict[str, WeightPart]] = {}
    for name, part in parts.items():
        parts_of.setdefault(part.fqn, {})[name] = part
    for fqn, shape in parameters.items():
        own = parts_of.setdefault(fqn, {fqn: WeightPart.whole(fqn, shape)})
        if (covered := sum(math.prod(part.size) for part in own.values())) != math.prod(shape):
            raise PlaitError(
                f"the model's weight_parts() have {covered} elements of {fqn!r}, which has {math.prod(shape)}"
            ).at("weight_parts", fqn, fits=f"{math.prod(shape)} elements")
    return parts_of
