"""Strategies that add parameters to a model, before anything is divided: all others see one model and one spec."""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import nn

from plait.contract.model_spec import ModelSpec
from plait.contract.run import Run
from plait.parallel.check_spec import check_spec
from plait.parallel.initialize import fill
from plait.parallel.ties import with_ties

if TYPE_CHECKING:
    from plait.strategies.hooks import Hooks


def extend(model: nn.Module, run: Run, hooks: "Hooks") -> None:
    """Call the hook of each strategy in turn, and tell `run` what came of it.

    A model with values gets them for the new parameters too. Raises PlaitError if the spec does not fit any more.
    """
    has_values = not any(param.is_meta for param in model.parameters())
    before = {fqn for fqn, _ in model.named_parameters()}
    for turn in hooks.turns:
        run.spec = hooks.fold("extend", turn.name, "spec", model=model, spec=run.spec, run=run)
    run.spec = with_ties(model, run.spec)
    check_spec(model, run.spec)
    run.shapes = {fqn: tuple(param.shape) for fqn, param in model.named_parameters()}
    run.parameters = sum(param.numel() for param in model.parameters())
    run.added = frozenset(run.shapes.keys() - before)
    if has_values:
        _fill_new(model, run.spec, run.config.train.seed)


@torch.no_grad()
def _fill_new(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Give the parameters on meta of a model that has values theirs, as `initialise` gives them."""
    device = next(param.device for param in model.parameters() if not param.is_meta)
    made: dict[int, nn.Parameter] = {}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for fqn, param in model.named_parameters():  # a tied one under its first name, as `initialise` fills it
            if param.is_meta:
                made[id(param)] = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
                fill(made[id(param)], fqn, spec.init_of(fqn), seed, pool)
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(old) in made:
                module.register_parameter(name, made[id(old)])
