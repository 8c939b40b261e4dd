"""What the ranks of local SGD must equal: its workers, one after the other in one process. Only for tests."""

from collections.abc import Iterable

import torch
from torch import Tensor

import plait
from plait.testing import Trial, TrialResult, batch, documents, full, whole


def simulate(trial: Trial, workers: int, every: int) -> list[TrialResult]:
    """One result per worker: its own gradients, norms and parameters, and the loss over the tokens of all workers."""
    copies = [trial.apply({}) for _ in range(workers)]
    models = [copy.parts[0] for copy in copies]
    optimizers = [trial.optimizer(copy.parameters()) for copy in copies]
    results = [TrialResult(whole(model), {}, [], [], {}) for model in models]
    for step in range(trial.steps):
        tokens, labels = batch(step)
        losses, total = [], int((labels != -100).sum())
        inputs = (tokens, documents(tokens)) if trial.documents else (tokens,)
        shares = zip(zip(*(each.chunk(workers) for each in inputs), strict=True), labels.chunk(workers), strict=True)
        for result, copy, optimizer, (x, y) in zip(results, copies, optimizers, shares, strict=True):
            loss = plait.cross_entropy_sum(copy.parts[0](*x), y)
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
            _average(zip(*(model.state_dict().values() for model in models), strict=True))
            for params in zip(*(copy.parameters() for copy in copies), strict=True):
                states = [o.state[p] for o, p in zip(optimizers, params, strict=True)]
                _average(tuple(state[key] for state in states) for key in states[0] if key != "step")
    for result, model in zip(results, models, strict=True):
        result.final.update(whole(model))
    return results


@torch.no_grad()
def _average(same: Iterable[tuple[Tensor, ...]]) -> None:
    for tensors in same:
        if not tensors[0].is_floating_point():
            continue  # token counts
        mean = torch.stack(tensors).mean(0)
        for tensor in tensors:
            tensor.copy_(mean)
