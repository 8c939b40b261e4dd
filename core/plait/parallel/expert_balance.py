"""The balance of experts: adds the routers' counts over the step and all ranks, once, and returns them to the routers.

`plait.contract.router` says what a router is.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.contract.errors import PlaitError
from plait.contract.model_spec import ModelSpec
from plait.contract.router import BalancesExperts, CountsExperts, is_joined

if TYPE_CHECKING:
    from plait.parallel.mesh import Mesh


@attrs.frozen
class Counted:
    """What one step sent to the experts: `counts`, of router after router; `names` and `sizes` of the routers."""

    counts: Tensor
    names: Sequence[str]
    sizes: Sequence[int]

    def row(self) -> dict[str, float]:
        """For metrics.jsonl: for every router the largest load over the mean, and the loads' entropy (1: even)."""
        row = {}
        for name, counts in zip(self.names, self.counts.cpu().split(list(self.sizes)), strict=True):
            share = counts.double() / counts.sum()
            row[f"experts/{name}/max_over_mean"] = float(share.max() * len(counts))
            row[f"experts/{name}/entropy"] = float(torch.special.entr(share).sum()) / math.log(max(len(counts), 2))
        return row


class Balance:
    """The routers of a model's parts. `counted`: of the last step; None before the first, or without routers."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        mesh: "Mesh",
        spec: ModelSpec,
        everywhere: Callable[[Mapping[str, Any]], Counted | None] | None = None,
    ) -> None:
        """everywhere: if the parts are not all of the model, what its routers counted, given those of the parts."""
        self.counted: Counted | None = None
        # Ranks that see the same tokens and whose gradients are summed: along axes that divide parameters, not along
        # others.
        self._same = math.prod(a.degree for a in mesh.layout.dense if a.splits is None and a.shards)
        self._data = mesh.data()
        self._scaled = False
        self._everywhere = everywhere
        self._routers: dict[str, CountsExperts] = {}
        for part in parts:
            routers = routers_by_block(part, spec)
            self._routers |= routers
            if routers:
                part.register_forward_pre_hook(functools.partial(_clear, list(routers.values())))
                part.register_forward_hook(functools.partial(self._add, list(routers.values())))
        with_loss: list[Any] = [r for r in self._routers.values() if getattr(r, "balance_loss", 0)]
        self._alone: list[BalancesExperts] = [r for r in with_loss if not is_joined(r)]
        self._joined: Any = None
        if joined := [r for r in with_loss if is_joined(r)]:
            from plait.parallel.joined_balance import JoinedRouters  # only runs with such a loss need it

            self._joined = JoinedRouters(joined, self._over_ranks, self._same, divided=everywhere is not None)

    def scale(self, tokens: int | Tensor) -> None:
        """The factor of the balance losses: divided as the loss is, and by the number of ranks that each compute all of
        it.

        Past autograd: the graph of a compiled block already holds the buffer, and reads it in backward.
        """
        if self._alone:
            scales = [r.loss_scale.data for r in self._alone]
            torch._foreach_zero_(scales)
            torch._foreach_add_(scales, 1 / tokens / self._same)
            self._scaled = True

    @torch.no_grad()
    def after_step(self) -> None:
        """Add what all ranks have seen since the last step, each token once, and update the routers."""
        if self._routers:
            self._update()
        if self._everywhere is not None:
            self.counted = self._everywhere(self._routers)

    def forget(self) -> None:
        """The step is skipped: what was seen in it counts for nothing."""
        for router in self._routers.values():
            router.seen.zero_()
        self._end(None)

    def _update(self) -> None:
        routers = list(self._routers.values())
        seen = self._over_ranks(torch.cat([r.seen for r in routers]))
        sizes = [len(r.seen) for r in routers]
        torch._foreach_copy_([r.counts for r in routers], list(seen.split(sizes)))
        torch._foreach_zero_([r.seen for r in routers])
        for router in routers:
            if {p.requires_grad for p in router.parameters()} != {False}:  # the choice of a frozen one is frozen too
                router.update()
        self._end(Counted(seen, list(self._routers), sizes))

    def _end(self, counted: Counted | None) -> None:
        self.counted, self._scaled = counted, False
        if self._joined:
            self._joined.forwards = 0

    def _over_ranks(self, counts: Tensor) -> Tensor:
        if self._data is not None and self._data.size() > 1:
            dist.all_reduce(counts, group=self._data.get_group())
        return counts

    @torch.no_grad()
    def _add(self, routers: list[CountsExperts], part: nn.Module, args: Any, result: Any) -> None:
        """Directly after forward, so that what recomputation writes in backward is not added."""
        if not part.training:
            return
        torch._foreach_add_([r.seen for r in routers], [r.now for r in routers])
        if not (isinstance(result, Tensor) and result.requires_grad):
            return
        if self._joined:
            self._joined.after_forward()
        if self._alone:
            result.register_hook(self._check)

    def _check(self, grad: Tensor) -> None:
        if not self._scaled:
            raise PlaitError(
                "the model has a balance loss, which must be divided as the loss is: "
                "call applied.backward(loss_sum, tokens) instead of (loss_sum / tokens).backward()"
            )


def routers_by_block(model: nn.Module, spec: ModelSpec) -> dict[str, CountsExperts]:
    """The routers of `model`, by the FQNs of their blocks; a second one in a block by its own."""
    named: dict[str, CountsExperts] = {}
    blocks = spec.blocks_of(model)
    for fqn, router in spec.routers_of(model).items():
        block = next((b for b in blocks if fqn.startswith(f"{b}.")), fqn)
        named[fqn if block in named else block] = router
    return named


@torch.no_grad()
def _clear(routers: list[CountsExperts], part: nn.Module, args: Any) -> None:
    if part.training:
        torch._foreach_zero_([r.now for r in routers])
