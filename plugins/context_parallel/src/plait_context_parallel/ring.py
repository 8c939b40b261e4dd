"""Attention of a rank's queries to keys and values that pass from rank to rank, a part at a time.

A part's result counts with the share of its exponentials (online softmax: Milakov and Gimelshein, arXiv 1805.02867).
Only one part's scores exist at a time, or none if torch has a fused kernel for what is asked; backward computes them
again from the logarithm of the sum of exponentials (Dao et al., "FlashAttention", arXiv 2205.14135, section 3.1) while
keys, values and their gradients go round once more.

Shapes: B batch, T tokens of a rank, K key and value heads, G query heads for each of them, E width of a head, S tokens
of a stretch.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait_context_parallel import fused
from plait_context_parallel.collectives import passed_on, waited
from plait_context_parallel.dealt import DealtTokens
from plait_context_parallel.fits import refuse_keywords
from plait_context_parallel.gather import visible
from plait_context_parallel.order import Order

LARGEST = 1 << 27  # scores that exist at a time: 512 MiB in float32


class Ring:
    """Mixed into the class of an inner attention."""

    _axis: Any
    _order: Order
    _dealt: DealtTokens
    _kernel: bool  # whether the device has one

    def forward(
        self,
        q_BHTE: Tensor,
        k_BKTE: Tensor,
        v_BKTE: Tensor,
        documents: Tensor | None = None,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        refuse_keywords(others, "ring")
        order = self._order
        if documents is not None and documents.dim() == 2:  # nothing was prepared
            documents = begins(documents, order, self._dealt)
        first_BT = None if documents is None else documents[:, 0, :, 0]
        q_BKGTE = q_BHTE.unflatten(1, (k_BKTE.shape[1], -1))
        sinks_KG = None if sinks is None else sinks.unflatten(0, (k_BKTE.shape[1], -1))
        plain = self._kernel and first_BT is None and softcap is None and window is None
        kernel = plain and fused.fits(q_BHTE, v_BKTE)
        scores = Scores(q_BHTE.shape[-1] ** -0.5 if scale is None else scale, softcap, window, kernel)
        return _Ring.apply(q_BKGTE, k_BKTE, v_BKTE, sinks_KG, first_BT, order, self._axis, scores).flatten(1, 2)


class RingMask:
    """Mixed into the class of the module that makes masks of documents."""

    _order: Order
    _dealt: DealtTokens

    def forward(self, positions_BT: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
        return begins(positions_BT, self._order, self._dealt)


def begins(positions_BT: Tensor, order: Order, dealt: DealtTokens) -> Tensor | None:
    """The place at which the document of each of the rank's tokens begins, (B, 1, T, 1); None: a row is one."""
    return order.begins(positions_BT)[:, None, :, None] if dealt.documents else None


class Scores(NamedTuple):
    """scale, softcap: as in `plait.ops.attend`. window: of keys that a query sees. fused: whether a kernel
    computes them."""

    scale: float
    softcap: float | None
    window: int | None
    fused: bool

    def of(self, q_BKGSE: Tensor, k_BKSE: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        scores = (q_BKGSE @ k_BKSE[:, :, None].mT).to(dtype) * self.scale
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh_() * self.softcap
        if mask is None:
            return scores
        return scores.masked_fill(~(mask if mask.dim() == 2 else mask[:, :, None]), -torch.inf)

    def backward(self, dscores: Tensor, scores: Tensor) -> Tensor:
        """The gradient of the products of queries and keys, from that of `scores`."""
        if self.softcap is not None:
            capped = scores.masked_fill(scores.isneginf(), 0.0) / self.softcap
            dscores = dscores * (1 - capped.square())
        return dscores * self.scale


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BKGTE: Tensor,
        k_BKTE: Tensor,
        v_BKTE: Tensor,
        sinks_KG: Tensor | None,
        first_BT: Tensor | None,
        order: Order,
        axis: Any,
        how: Scores,
    ) -> Tensor:
        dtype = torch.promote_types(q_BKGTE.dtype, torch.float32)
        out = q_BKGTE.new_zeros(*q_BKGTE.shape[:-1], v_BKTE.shape[-1], dtype=dtype)
        lse = q_BKGTE.new_full(q_BKGTE.shape[:-1], -torch.inf, dtype=dtype)
        width = k_BKTE.shape[-1], v_BKTE.shape[-1]
        passing = torch.cat([k_BKTE, v_BKTE], dim=-1)
        for step in range(order.ranks):
            coming = passed_on(passing, axis) if step < order.ranks - 1 else None
            k, v = passing.split(width, dim=-1)
            source = (order.rank - step) % order.ranks
            for queries, keys, causal in _stretches(q_BKGTE, order, source) if how.fused else ():
                part, sums = _fused(q_BKGTE[..., queries, :], k[..., keys, :], v[..., keys, :], causal, how.scale)
                total = torch.logaddexp(lse[..., queries], sums)
                out[..., queries, :].mul_((lse[..., queries] - total).exp_()[..., None])
                out[..., queries, :].add_(part * (sums - total).exp_()[..., None])
                lse[..., queries] = total
            for queries, keys, mask in _pairs(q_BKGTE, first_BT, order, source, how) if not how.fused else ():
                scores = how.of(q_BKGTE[..., queries, :], k[..., keys, :], mask, dtype)
                sums = scores.logsumexp(-1)
                total = torch.logaddexp(lse[..., queries], sums)
                part = (scores - total[..., None]).exp_().to(v.dtype) @ v[:, :, None, keys]
                out[..., queries, :].mul_((lse[..., queries] - total).exp_()[..., None]).add_(part)
                lse[..., queries] = total
            if coming is not None:
                passing = waited(coming).view_as(passing)
        if sinks_KG is not None:  # a share of the exponentials that has no value
            total = torch.logaddexp(lse, sinks_KG[..., None].to(dtype))
            out.mul_((lse - total).exp_()[..., None])
            lse = total
        out = out.to(q_BKGTE.dtype)
        ctx.save_for_backward(q_BKGTE, k_BKTE, v_BKTE, sinks_KG, first_BT, out, lse)
        ctx.order, ctx.axis, ctx.how = order, axis, how
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k_BKTE, v_BKTE, sinks_KG, first_BT, out, lse = ctx.saved_tensors
        order, axis, how, dtype = ctx.order, ctx.axis, ctx.how, lse.dtype
        width = k_BKTE.shape[-1], v_BKTE.shape[-1]
        dq = torch.zeros_like(q, dtype=dtype)
        delta = (dout.to(dtype) * out).sum(-1)
        passing = torch.cat([k_BKTE, v_BKTE], dim=-1)
        grads = torch.zeros_like(passing, dtype=dtype)
        for step in range(order.ranks):
            coming = passed_on(passing, axis) if step < order.ranks - 1 else None
            (k, v), (dk, dv) = passing.split(width, dim=-1), grads.split(width, dim=-1)
            source = (order.rank - step) % order.ranks
            for queries, keys, causal in _stretches(q, order, source) if how.fused else ():
                dmine, mine, result = (x[..., queries, :] for x in (dout, q, out))
                theirs, sums = (k[..., keys, :], v[..., keys, :]), lse[..., queries]
                of_q, of_k, of_v = _fused_backward(dmine, mine, result, *theirs, sums, causal, how.scale)
                dq[..., queries, :] += of_q
                dk[..., keys, :] += of_k
                dv[..., keys, :] += of_v
            for queries, keys, mask in _pairs(q, first_BT, order, source, how) if not how.fused else ():
                scores = how.of(q[..., queries, :], k[..., keys, :], mask, dtype)
                p = (scores - lse[..., queries, None]).exp_()
                d, of = dout[..., queries, :], p.to(dout.dtype)
                dv[..., keys, :] += (of.mT @ d).sum(2)
                dscores = how.backward(p * (d @ v[:, :, None, keys].mT - delta[..., queries, None]), scores)
                dscores = dscores.to(q.dtype)
                dq[..., queries, :] += dscores @ k[:, :, None, keys]
                dk[..., keys, :] += (dscores.mT @ q[..., queries, :]).sum(2)
            grads = waited(passed_on(grads, axis)).view_as(grads)  # home after as many steps as ranks
            if coming is not None:
                passing = waited(coming).view_as(passing)
        dk, dv = grads.split(width, dim=-1)
        dsinks = None
        if sinks_KG is not None:
            shares = (sinks_KG[..., None].to(dtype) - lse).exp_()
            dsinks = -(shares * delta).sum((0, -1)).to(sinks_KG.dtype)
        return dq.to(q.dtype), dk.to(k_BKTE.dtype), dv.to(v_BKTE.dtype), dsinks, None, None, None, None


def _fused(q_BKGSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(result, logarithms of the sums of exponentials), in the shape of the queries."""
    heads = q_BKGSE.shape[1:3]
    q, k, v = (x.contiguous() for x in (q_BKGSE.flatten(1, 2), *_by_head(q_BKGSE, k_BKSE, v_BKSE)))
    out, lse = fused.forward(q, k, v, causal, scale)
    return out.unflatten(1, heads), lse.unflatten(1, heads)


def _fused_backward(
    dout: Tensor, q: Tensor, out: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    heads = q.shape[1:3]
    given = (dout, q, *_by_head(q, k_BKSE, v_BKSE), out, lse)
    dout, q, k, v, out, lse = ((x.flatten(1, 2) if x.dim() > 4 or x is lse else x).contiguous() for x in given)
    dq, dk, dv = (x.unflatten(1, heads) for x in fused.backward(dout, q, k, v, out, lse, causal, scale))
    return dq, dk.sum(2), dv.sum(2)


def _by_head(q_BKGSE: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
    """Keys and values once for each query head: the kernels know no groups."""
    groups = q_BKGSE.shape[2]
    return tuple(x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in shared)


def _stretches(q: Tensor, order: Order, source: int) -> Iterator[tuple[slice, slice, bool]]:
    """(queries, keys, whether they are the same stretch) of every two stretches of which one sees something of the
    other. source: the rank whose keys these are."""
    own, theirs = order.of(order.rank), order.of(source)
    length = q.shape[-2] // len(own)
    for i, mine in enumerate(own):
        for j, other in enumerate(theirs):
            if other <= mine:
                yield slice(i * length, (i + 1) * length), slice(j * length, (j + 1) * length), other == mine


def _pairs(
    q: Tensor, first_BT: Tensor | None, order: Order, source: int, how: Scores
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """(queries, keys, mask) of every two stretches of which one may see something of the other, some queries at a time.

    source: the rank whose keys these are. mask: None if every query sees every key.
    """
    own, theirs, window = order.of(order.rank), order.of(source), how.window
    tokens = q.shape[-2]
    length = tokens // len(own)
    places, keys = (order.places(tokens, rank, q.device) for rank in (order.rank, source))
    rows = max(LARGEST // (math.prod(q.shape[:-2]) * length), 1)
    for i, mine in enumerate(own):
        for j, other in reversed(list(enumerate(theirs))):  # first a query's own place, so that no sum is of nothing
            if other > mine or (window is not None and (mine - other - 1) * length + 1 >= window):
                continue
            of = slice(j * length, (j + 1) * length)
            masked = first_BT is not None or other == mine or window is not None
            for start in range(i * length, (i + 1) * length, rows):
                at = slice(start, min(start + rows, (i + 1) * length))
                yield at, of, visible(places[at], keys[of], first_BT, at, window) if masked else None
