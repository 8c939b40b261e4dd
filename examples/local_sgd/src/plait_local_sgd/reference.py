"""What the ranks of local SGD must equal: its workers, one after the other in one process. Only for tests."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import plait
from plait.ops import cross_entropy_sum
from plait.testing import Trial, TrialResult, batch, documents, full, whole

Meet = Callable[[list[plait.Applied], list[torch.optim.Optimizer]], None]


def average(copies: list[plait.Applied], optimizers: list[torch.optim.Optimizer]) -> None:
    """Workers meet at the average of all that they have."""
    average_models(copies)
    for params in zip(*(copy.parameters() for copy in copies), strict=True):
        states = [o.state[p] for o, p in zip(optimizers, params, strict=True)]
        set_to_mean(tuple(state[key] for state in states) for key in states[0] if key != "step")


def average_models(copies: list[plait.Applied]) -> None:
    """Their parameters and persistent buffers."""
    set_to_mean(zip(*(copy.parts[0].state_dict().values() for copy in copies), strict=True))


def simulate(trial: Trial, workers: int, every: int, meet: Meet = average) -> list[TrialResult]:
    """One result per worker: its own gradients, norms and parameters, and the loss over the tokens of all workers.

    meet: what they do after every `every` steps.
    """
    copies = [trial.apply({}) for _ in range(workers)]
    models = [copy.parts[0] for copy in copies]
    optimizers = [trial.optimizer(copy.parameters()) for copy in copies]
    results = [TrialResult(whole(model), {}, [], [], {}) for model in models]
    for step in range(trial.steps):
        tokens, labels = batch(step)
        losses, total = [], int((labels != plait.IGNORE).sum())
        inputs = (tokens, documents(tokens)) if trial.documents else (tokens,)
        shares = zip(zip(*(each.chunk(workers) for each in inputs), strict=True), labels.chunk(workers), strict=True)
        for result, copy, optimizer, (x, y) in zip(results, copies, optimizers, shares, strict=True):
            loss = cross_entropy_sum(copy.parts[0](*x), y)
            losses.append(float(loss.detach() / total))
            copy.backward(loss, total / workers)
            if step == 0:
                named = copy.parts[0].named_parameters()
                result.gradients.update({name: full(p.grad) for name, p in named if p.grad is not None})
            result.norms.append(float(copy.clip_grads(trial.max_norm)))
            optimizer.step()
            optimizer.zero_grad()
        for copy, optimizer in zip(copies, optimizers, strict=True):
            copy.after_step(optimizer, step + 1)
        for result in results:
            result.losses.append(sum(losses))
        if (step + 1) % every == 0:
            meet(copies, optimizers)
    for result, model in zip(results, models, strict=True):
        result.final.update(whole(model))
    return results


@torch.no_grad()
def set_to_mean(same: Iterable[tuple[Tensor, ...]]) -> None:
    """Each tensor becomes the mean of those in its tuple."""
    for tensors in same:
        if not tensors[0].is_floating_point():
            continue  # token counts
        mean = torch.stack(tensors).mean(0)
        for tensor in tensors:
            tensor.copy_(mean)
