"""What the ranks of DiLoCo must equal: its workers, one after the other in one process, and torch's SGD as the outer
optimizer. Only for tests."""

import torch
from plait_local_sgd.reference import average_models
from plait_local_sgd.reference import simulate as simulate_workers

import plait
from plait.testing import Trial, TrialResult


def simulate(trial: Trial, workers: int, every: int, lr: float, momentum: float) -> list[TrialResult]:
    """One result per worker, as of local SGD."""
    met = trial.apply({}).parameters()
    outer = torch.optim.SGD(met, lr=lr, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def meet(copies: list[plait.Applied], optimizers: list[torch.optim.Optimizer]) -> None:
        average_models(copies)
        for start, param in zip(met, copies[0].parameters(), strict=True):
            start.grad = start - param
        outer.step()
        for copy in copies:
            for start, param in zip(met, copy.parameters(), strict=True):
                param.copy_(start)

    return simulate_workers(trial, workers, every, meet)
