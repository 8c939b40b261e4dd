"""Gives a model's attention the whole sequence."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from plait import ModelSpec, PlaitError, mix_in
from plait.ops import attend
from plait_context_parallel.dealt import DealtTokens
from plait_context_parallel.fits import KEY
from plait_context_parallel.gather import Gathered, GatheredMask
from plait_context_parallel.order import Order
from plait_context_parallel.ring import Ring, RingMask
from plait_context_parallel.ulysses import Ulysses, UlyssesMask

HOW = {"gather": (Gathered, GatheredMask), "ring": (Ring, RingMask), "ulysses": (Ulysses, UlyssesMask)}


def divide(
    model: nn.Module, axis: Any, spec: ModelSpec, dealt: DealtTokens, method: str, order_name: str, fused: bool
) -> None:
    """Change `model` in place. axis: 1-D DeviceMesh. fused: whether the device has kernels for `ring`.

    Raises PlaitError if `gather` or `ring` would compute something other than the model's attention.
    """
    order = Order.on(axis, order_name)
    model.register_forward_pre_hook(lambda model, args: _refuse_undealt(dealt, args[0]) if args else None)
    attention, mask = HOW[method]
    documents = model.get_submodule(spec.documents) if spec.documents else None
    for fqn, inner in spec.attention_of(model).items():
        if method != "ulysses":
            _refuse_unlike(fqn, inner, documents, method)
        _replace(inner, attention, axis, order, dealt)
        inner.__dict__["_kernel"] = fused
    if documents is not None:
        _replace(documents, mask, axis, order, dealt)


def _replace(module: nn.Module, mixin: type, axis: Any, order: Order, dealt: DealtTokens) -> None:
    mix_in(module, mixin)
    module.__dict__ |= {"_axis": axis, "_order": order, "_dealt": dealt}


def _refuse_undealt(dealt: DealtTokens, tokens_BT: Tensor) -> None:
    if tokens_BT.shape[1] != dealt.count:
        raise PlaitError(
            f"the model got {tokens_BT.shape[1]} tokens of a sequence, and this rank was dealt {dealt.count}: with "
            "context_parallel every batch goes through `applied.deal(batch)`"
        )


def _refuse_unlike(fqn: str, inner: nn.Module, documents: nn.Module | None, method: str) -> None:
    """`gather` and `ring` compute attention themselves: compare their formula with the module's on a few numbers, with
    each keyword that it takes."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 6, 8, dtype=torch.float64, generator=generator, device="cpu") for n in (4, 2, 2))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device="cpu")
    mask = torch.ones(6, 6, dtype=torch.bool, device="cpu").tril()
    document = torch.arange(6, device="cpu") // 3
    takes = inspect.signature(inner.forward).parameters
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64, device="cpu")
    given = {"scale": 0.5, "softcap": 0.7, "sinks": sinks}
    refusal = PlaitError(
        f"{KEY}.method={method} computes attention as docs/model-spec.md declares it, but {fqn!r} computes something "
        "else, such as another scale, a window or a cap that is not a keyword of the call; use ulysses"
    ).at(f"{KEY}.method", method, fits=("ulysses",))
    try:
        with torch.no_grad(), torch.device("cpu"):
            made = positions if documents is None else documents(positions, q.dtype)
            cases: list[tuple[Any, Tensor, dict[str, Any]]] = [(None, mask, {})]
            cases.append((made, mask & (document[:, None] == document), {}))
            cases += [(None, mask, {name: value}) for name, value in given.items() if name in takes]
            pairs = [(inner(q, k, v, at, **how), attend(q, k, v, sees, **how)) for at, sees, how in cases]
            if "window" in takes:
                pairs.append((inner(q, k, v, None, window=2), attend(q, k, v, mask.triu(-1))))
    except Exception as error:  # it needs something else than these numbers, so it is something else
        raise refusal from error
    if not all(a.shape == b.shape and torch.allclose(a, b) for a, b in pairs):
        raise refusal
