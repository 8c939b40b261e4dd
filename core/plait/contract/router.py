"""What the core asks of a module that sends tokens to experts; `plait.parallel.expert_balance` calls it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # `import plait` must not import torch
    from torch import Tensor

COUNTS = ("now", "seen", "counts")


class CountsExperts(Protocol):
    """A module of `ModelSpec.routers`; counts are int64 buffers (X,), one element per expert.

    now: copies of tokens that the last forward in training sent to each expert; a forward overwrites it, so that a
    recomputed one counts nothing twice. Not persistent.
    seen: the core's sum of `now` over this rank's forwards of the step. Not persistent.
    counts: what the last step sent, over all ranks that see different tokens.

    It may tell how many experts a token visits, `top_k`; without it, one.
    """

    now: "Tensor"
    seen: "Tensor"
    counts: "Tensor"

    def update(self) -> Any:
        """Called after every step, alike on all ranks: it may read `counts`, and change the router's state."""

    def parameters(self) -> "Iterator[Tensor]": ...


class BalancesExperts(CountsExperts, Protocol):
    """A router with a loss, which its backward adds.

    balance_loss: its factor; 0: none.
    loss_scale: float64 buffer, not persistent, which the core fills before backward. One element: the loss is this
    router's alone, and the element is its factor. One per expert: the loss joins all routers; an element is the number
    of copies that they sent to the expert, divided by the square of the number that they sent to all experts, in one
    forward on all ranks. Either is divided by the number of ranks that see the same tokens and sum their gradients.
    """

    balance_loss: float
    loss_scale: "Tensor"


def is_joined(router: Any) -> bool:
    """Whether the loss of this router, if it has one, joins all routers: a step must then take its rows at once."""
    return bool(getattr(router, "balance_loss", 0)) and router.loss_scale.numel() > 1
