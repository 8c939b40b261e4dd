"""Mixture of experts (DeepSeekMoE, arXiv:2401.06066; DeepSeek-V3, arXiv:2412.19437, section 2.1.2) that drops no token.

Shapes: B batch, T tokens of a sequence, N tokens (or, sorted by expert, their copies), D model width, X experts,
G groups of experts, K experts that a token visits, F inner width of an expert.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait import PlaitError
from plait.ops import Copies, chosen, counts_for_products, grouped_linear, with_loss, zeros
from plait_models.options import at_most, divides, positive_int

TINY = 1e-20  # of a sum of scores: sigmoids of logits below -100 are zero, and then there is nothing to divide by


class Experts(nn.Module):
    """SwiGLU experts, stacked along dim 0.

    It knows nothing of ranks: a strategy that divides experts gives it fewer of them, and through hooks the rows that
    belong to these.
    """

    def __init__(self, n_experts: int, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, ffn_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, ffn_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, ffn_dim, dim))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, x_ND: Tensor, counts_X: Tensor) -> Tensor:
        """(N, D) of rows sorted by expert; `counts_X` (int64): the rows of each expert."""
        counts_X = counts_for_products(x_ND, counts_X)
        gate_NF, up_NF = grouped_linear(x_ND, self.w1, counts_X), grouped_linear(x_ND, self.w3, counts_X)
        return grouped_linear(F.silu(gate_NF) * up_NF, self.w2, counts_X)


class RowMean(nn.Module):
    """The mean over the tokens of each row, (B, T, X) to (B, X): a module, so that a strategy can complete it."""

    def forward(self, x_BTX: Tensor) -> Tensor:
        return x_BTX.mean(-2)


class Router(nn.Module):
    """Chooses the experts of a token and their weights. Scores are computed at least in float32.

    score:        "sigmoid" or "softmax" of the logits. n_groups, top_groups: number of groups of experts, and how many
    of them, the best, a token may visit; a group's score is the sum of its `group_top` best scores (2: DeepSeek-V3; 1:
    DeepSeek-V2).
    norm_weights: divide the weights by their sum. scale: factor of the weights.
    bias_update:  how much a step changes an expert's bias towards balance (arXiv:2408.15664); 0: not at all. The bias
                  affects only the choice.
    balance_loss: factor of the sequence-wise balance loss; 0: none.

    Buffers, for the core (`plait.parallel.expert_balance`): `now`, copies of tokens sent to each expert by the last
    training forward, overwritten, so that recomputation counts nothing twice; `seen`, their sum over this rank's
    micro-batches of the step; `counts`, the last step's over all ranks; `bias`; `loss_scale`, the factor of the balance
    loss in backward.
    """

    def __init__(
        self,
        n_experts: int,
        dim: int,
        top_k: int,
        *,
        score: str = "softmax",
        n_groups: int = 1,
        top_groups: int = 1,
        group_top: int = 2,
        norm_weights: bool = True,
        scale: float = 1.0,
        bias_update: float = 0.0,
        balance_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.top_k, self.score, self.norm_weights, self.scale = top_k, score, norm_weights, scale
        self.n_groups, self.top_groups, self.group_top = n_groups, top_groups, group_top
        self.bias_update, self.balance_loss = bias_update, balance_loss
        self.row_mean = RowMean()
        self.weight = nn.Parameter(torch.empty(n_experts, dim))
        nn.init.normal_(self.weight, std=0.02)
        self.bias: Tensor
        self.now: Tensor
        self.seen: Tensor
        self.counts: Tensor
        self.loss_scale: Tensor
        self.register_buffer("bias", torch.zeros(n_experts, dtype=torch.float32))
        self.register_buffer("counts", torch.zeros(n_experts, dtype=torch.int64))
        self.register_buffer("now", torch.zeros(n_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("seen", torch.zeros(n_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("loss_scale", torch.full((1,), torch.nan, dtype=torch.float64), persistent=False)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights (N, K), their experts (N, K), and the number of copies for each expert (X,)."""
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        logits_BTX = F.linear(x_BTD.to(dtype), self.weight.to(dtype))
        scores_BTX = logits_BTX.sigmoid() if self.score == "sigmoid" else logits_BTX.softmax(-1)
        if self.balance_loss and self.training:
            loss = self.balance_loss * sequence_imbalance(scores_BTX, self.top_k, self.row_mean)
            scores_BTX = with_loss(scores_BTX, loss, self.loss_scale)
        scores_NX = scores_BTX.flatten(0, -2)
        chosen_NK = self._choose(scores_NX.detach() + self.bias)
        counts_X = chosen(chosen_NK, scores_NX.shape[-1]).sum(0)
        if self.training:
            self.now.copy_(counts_X)
        weights_NK = scores_NX.gather(-1, chosen_NK)
        if self.norm_weights:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + TINY)
        return weights_NK * self.scale, chosen_NK, counts_X

    def _choose(self, biased_NX: Tensor) -> Tensor:
        if self.n_groups > 1:
            grouped_NGx = biased_NX.unflatten(-1, (self.n_groups, -1))
            best_NG = grouped_NGx.topk(self.group_top, dim=-1).values.sum(-1)
            open_NG = chosen(best_NG.topk(self.top_groups, dim=-1).indices, self.n_groups)
            biased_NX = grouped_NGx.masked_fill(~open_NG[..., None], -torch.inf).flatten(-2)
        return biased_NX.topk(self.top_k, dim=-1).indices

    @torch.no_grad()
    def update(self) -> None:
        """The bias of experts with more than the mean of `counts` falls by `bias_update`; that of the others rises."""
        excess_X = self.counts * len(self.counts) - self.counts.sum()  # in integers, so that no rounding decides
        self.bias.sub_(self.bias_update * excess_X.sign())


class MoE(nn.Module):
    """A branch: every token goes to the experts that the router chooses, and to the shared one if there is one."""

    def __init__(self, router: Router, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared

    def forward(self, x_BTD: Tensor) -> Tensor:
        weights_NK, chosen_NK, counts_X = self.router(x_BTD)
        copies = Copies(chosen_NK)
        out_ND = self.experts(copies.sorted(x_BTD.flatten(0, -2)), counts_X)
        # Between the experts' call and the use of its result, so that it overlaps with what crosses ranks meanwhile.
        shared_BTD = self.shared(x_BTD) if self.shared is not None else None
        out_BTD = copies.summed(out_ND, weights_NK).view_as(x_BTD)
        return out_BTD if shared_BTD is None else out_BTD + shared_BTD


def check(n_experts: int, top_k: int, n_groups: int = 1, top_groups: int = 1, group_top: int = 2) -> None:
    """Raises PlaitError, naming `model.<key>`, for options of a mixture that do not fit."""
    positive_int(n_experts=n_experts, top_k=top_k, n_groups=n_groups, top_groups=top_groups, group_top=group_top)
    at_most("top_k", top_k, "n_experts", n_experts)
    if n_groups > 1:
        divides("n_groups", n_groups, "n_experts", n_experts)
        at_most("top_groups", top_groups, "n_groups", n_groups)
        size = n_experts // n_groups
        if group_top > size or top_k > top_groups * size:
            key, value = ("group_top", group_top) if group_top > size else ("top_k", top_k)
            raise PlaitError(
                f"model.{key} is {value}, but model.n_experts = {n_experts} in model.n_groups = {n_groups} makes "
                f"groups of {size}, of which model.top_groups = {top_groups} are open to a token"
            ).at(f"model.{key}", value, fits=f"at most {size if key == 'group_top' else top_groups * size}")


def axes(fqn: str) -> dict[str, tuple[str | None, ...]]:
    """For a spec: logical axes of router and experts of the `MoE` at `fqn`."""
    return {
        f"{fqn}.router.weight": (None, "embed"),
        f"{fqn}.experts.w1": ("experts", "ffn", "embed"),
        f"{fqn}.experts.w2": ("experts", "embed", "ffn"),
        f"{fqn}.experts.w3": ("experts", "ffn", "embed"),
    }


def init(fqn: str, inner: Callable[..., Any], onto_stream: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """For a spec: their initialisation, the experts' last projection by `onto_stream`; the state of balance is zero."""
    return {
        f"{fqn}.router.weight": inner,
        f"{fqn}.router.*": zeros,
        f"{fqn}.experts.w2": onto_stream,
        f"{fqn}.experts.w*": inner,
    }


def sequence_imbalance(scores_BTX: Tensor, top_k: int, row_mean: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum over sequences of T x equation (17) of arXiv:2412.19437 (equations 17 to 20) without its factor; 1 per token
    if experts are used evenly.

    As in the paper, the counts are of each token's best unbiased scores. Their gradient is taken as zero.
    """
    n_experts = scores_BTX.shape[-1]
    best_BTK = scores_BTX.detach().topk(top_k, dim=-1).indices
    visits_BX = row_mean(chosen(best_BTK, n_experts).to(scores_BTX.dtype)) * (n_experts / top_k)
    share_BTX = scores_BTX / (scores_BTX.sum(-1, keepdim=True) + TINY)
    return (visits_BX * share_BTX.sum(-2)).sum()
