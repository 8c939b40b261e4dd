"""What the ranks of local SGD must equal: its workers, one after the other in one process. For tests alone."""

from collections.abc import Iterable

import torch
from torch import Tensor

import plait
from plait.testing.trial import Trace, Trial, batch, full, whole


def simulate(trial: Trial, workers: int, every: int) -> list[Trace]:
    """One trace a worker: its own gradients, norms and parameters, and the loss over all of their tokens."""
    copies = [trial.apply({}) for _ in range(workers)]
    models = [copy.parts[0] for copy in copies]
    optimizers = [trial.optimizer(copy.parameters()) for copy in copies]
    traces = [Trace(whole(model), {}, [], [], {}) for model in models]
    for step in range(trial.steps):
        tokens, labels = batch(step)
        losses, total = [], int((labels != -100).sum())
        shares = zip(tokens.chunk(workers), labels.chunk(workers), strict=True)
        for trace, copy, optimizer, (t, y) in zip(traces, copies, optimizers, shares, strict=True):
            loss = plait.cross_entropy_sum(copy.parts[0](t), y)
            losses.append(float(loss.detach() / total))
            copy.backward(loss, total / workers)
            if step == 0:
                trace.gradients.update({name: full(p.grad) for name, p in copy.parts[0].named_parameters()})
            trace.norms.append(float(copy.clip_grads(trial.max_norm)))
            optimizer.step()
            optimizer.zero_grad()
        for copy, optimizer in zip(copies, optimizers, strict=True):
            copy.after_step(optimizer, step + 1)
        for trace in traces:
            trace.losses.append(sum(losses))
        if (step + 1) % every == 0:
            _average(zip(*(model.state_dict().values() for model in models), strict=True))
            for params in zip(*(copy.parameters() for copy in copies), strict=True):
                states = [o.state[p] for o, p in zip(optimizers, params, strict=True)]
                _average(tuple(state[key] for state in states) for key in states[0] if key != "step")
    for trace, model in zip(traces, models, strict=True):
        trace.final.update(whole(model))
    return traces


@torch.no_grad()
def _average(same: Iterable[tuple[Tensor, ...]]) -> None:
    for tensors in same:
        if not tensors[0].is_floating_point():
            continue  # numbers of tokens
        mean = torch.stack(tensors).mean(0)
        for tensor in tensors:
            tensor.copy_(mean)
