"""Initialisation: functions `fn(tensor, generator)` that fill a tensor in place, for `ModelSpec.init`.

They compare by value and can be pickled, so that two specs can be compared.
"""

from collections.abc import Callable

import attrs
from torch import Generator, Tensor, nn


@attrs.frozen
class Normal:
    """Draws from a normal distribution around 0.

    std: its standard deviation.
    """

    std: float

    def __call__(self, tensor: Tensor, generator: Generator | None = None) -> Tensor:
        """Fills `tensor` and returns it."""
        return tensor.normal_(0.0, self.std, generator=generator)


@attrs.frozen
class TruncNormal:
    """Like `Normal`, but draws values beyond a bound again; on a CPU ten times as slow.

    std: standard deviation before that. cut: the bound, in standard deviations.
    """

    std: float
    cut: float = 3.0

    def __call__(self, tensor: Tensor, generator: Generator | None = None) -> Tensor:
        """Fills `tensor` and returns it."""
        bound = self.cut * self.std
        return nn.init.trunc_normal_(tensor, 0.0, self.std, -bound, bound, generator=generator)


@attrs.frozen
class ZeroRow:
    """Fills all rows of dim 0 but one, which is 0, such as that of a padding token. For two or more dims.

    fill: what fills the others. zero: the number of the row.
    """

    fill: Callable[[Tensor, Generator | None], Tensor]
    zero: int

    def __call__(self, tensor: Tensor, generator: Generator | None = None, row: int | None = None) -> Tensor:
        """Fills `tensor` and returns it."""
        return tensor.zero_() if row == self.zero else self.fill(tensor, generator)


@attrs.frozen
class Constant:
    """The same value everywhere.

    value: of each element.
    """

    value: float

    def __call__(self, tensor: Tensor, generator: Generator | None = None) -> Tensor:
        """Fills `tensor` and returns it."""
        return tensor.fill_(self.value)


zeros = Constant(0.0)
ones = Constant(1.0)
