"""A balance loss of all routers together: what they sent to each expert in a forward is added up before backward."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plait.contract.errors import PlaitError
from plait.contract.router import BalancesExperts

AT_ONCE = (
    "the model has a balance loss of all its routers together, over the whole batch: a step must compute all rows at "
    "once, in all layers"
)


class JoinedRouters:
    """The routers whose loss is one. `forwards`: of this step so far."""

    def __init__(
        self, routers: Sequence[BalancesExperts], over_ranks: Callable[[Tensor], Tensor], same: int, *, divided: bool
    ) -> None:
        """over_ranks: adds counts up over ranks that see different tokens. same: number of ranks that see the same
        tokens and sum their gradients. divided: whether other ranks have other layers; then it raises PlaitError."""
        if divided:
            raise PlaitError(f"{AT_ONCE}, but the layers are divided among ranks")
        self.routers, self.over_ranks, self.same, self.forwards = routers, over_ranks, same, 0

    def after_forward(self) -> None:
        """Write `loss_scale` of each router. Raises PlaitError in the second forward of a step."""
        self.forwards += 1
        if self.forwards > 1:
            raise PlaitError(f"{AT_ONCE}, but this is the second forward of the step")
        counts = self.over_ranks(torch.stack([r.now for r in self.routers]).sum(0)).double()
        scale = counts / counts.sum() ** 2 / self.same
        torch._foreach_copy_([r.loss_scale.data for r in self.routers], [scale] * len(self.routers))
