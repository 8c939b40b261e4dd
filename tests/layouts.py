"""Runs one layout in a pool of ranks with a loop of its own, and compares it with one process."""

from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import plait
from plait.config import Compile, Precision, Remat
from plait.loss import parallel, valid_tokens
from plait.plugins import create

TINY = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 64, "max_seq_len": 64}
FLOAT64 = Precision("float64", "float64", "float64")


@attrs.frozen
class Trace:
    """What a layout did: everything as full tensors on the CPU, by FQN."""

    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of the first step, before clipping
    losses: list[float]
    norms: list[float]
    final: dict[str, Tensor]


def llama(**changes: Any) -> torch.nn.Module:
    from plait.models.llama3 import Llama3

    with torch.device("meta"):
        return Llama3(**{**TINY, **changes})


def batch(step: int, samples: int = 8, seq_len: int = 16, vocab: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, vocab, (samples, seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[::3, :5] = -100  # ranks hold unequal counts of valid tokens, as in real data
    return tokens[:, :-1], labels


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def run_layout(
    strategies: dict[str, dict[str, Any]],
    *,
    steps: int = 3,
    precision: Precision = FLOAT64,
    micro: int = 1,
    remat: str = "none",
    compiled: str | None = None,
    make: Any = llama,
    extra: tuple[Any, ...] = (),
    max_norm: float = 1.0,
) -> Trace:
    """Train `make()` under `strategies` for `steps` on batches that do not depend on the layout."""
    model = make()
    spec = model.spec()
    applied = plait.apply(
        model,
        spec,
        [*(create(name, options) for name, options in strategies.items()), *extra],
        precision=precision,
        remat=Remat(remat),
        compile=Compile(enabled=compiled is not None, backend=compiled or "eager"),
    )
    (model,) = applied.parts
    initial = {name: full(p) for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(applied.parameters(), lr=1e-2)
    losses, norms, gradients = [], [], {}
    index, count = applied.mesh.share("batch")
    for step in range(steps):
        tokens, labels = batch(step)
        total = valid_tokens(labels)
        size = len(tokens) // count
        mine = slice(index * size, (index + 1) * size)
        summed = torch.zeros((), dtype=torch.float64)
        for t, y in zip(tokens[mine].chunk(micro), labels[mine].chunk(micro), strict=True):
            logits = model(t)
            with parallel(logits):
                loss = plait.cross_entropy_sum(logits, y) / total
                loss.backward()
            summed += loss.detach()
        if not applied.mesh.leads():
            summed.zero_()
        dist.all_reduce(summed)
        losses.append(float(summed))
        if step == 0:
            gradients = {name: full(p.grad) for name, p in model.named_parameters()}
        norms.append(float(applied.clip_grads(max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        applied.after_step(optimizer, step + 1)
    return Trace(initial, gradients, losses, norms, {name: full(p) for name, p in model.named_parameters()})


def worst_gradient(trace: Trace, reference: Trace) -> tuple[float, str]:
    """(error, FQN) of the gradient furthest off: |g - r| / max(|r|, 1e-3 |R|), R the whole gradient."""
    whole = torch.stack([g.double().norm() for g in reference.gradients.values()]).norm()
    errors = {
        name: float((trace.gradients[name] - r).double().norm() / max(r.double().norm(), 1e-3 * whole))
        for name, r in reference.gradients.items()
    }
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
