"""A strategy may own the optimizer: it gets the groups, and a run that steps another one is refused."""

import sys
from typing import Any

import attrs
import cloudpickle
import torch

from plait import PlaitError, hookimpl
from plait.testing import Trial, full, take_step

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test


@attrs.define
class Twins:
    """Updates copies of the parameters, which it puts back after every step."""

    name = "twins"

    @hookimpl
    def optimizer(self, groups: Any, make: Any) -> Any:
        live = [param for group in groups for param in group["params"]]
        twins = {id(p): torch.nn.Parameter(p.detach().clone()) for p in live}
        made = make([{**group, "params": [twins[id(p)] for p in group["params"]]} for group in groups])

        def before(*_: Any) -> None:
            for param in live:
                twins[id(param)].grad = param.grad

        @torch.no_grad()
        def after(*_: Any) -> None:
            for param in live:
                param.copy_(twins[id(param)])
                param.grad = None

        made.register_step_pre_hook(before)
        made.register_step_post_hook(after)
        return made


@attrs.define
class Wrong:
    name = "wrong"

    @hookimpl
    def optimizer(self) -> Any:
        return "an optimizer"


@attrs.define
class Half:
    name = "half"

    @hookimpl
    def optimizer(self, groups: Any, make: Any) -> Any:
        return make([{**g, "params": g["params"][::2], "names": g["names"][::2]} for g in groups])


def trained(extra):
    """(losses of two steps, the state that a checkpoint would hold)."""
    trial = Trial()
    applied = trial.apply({}, extra)
    optimizer = applied.optimizer(trial.optimizer)
    losses = [take_step(applied, optimizer, trial, step)[0] for step in range(2)]
    return losses, {key: full(tensor) for key, tensor in applied.checkpoint(optimizer)[0].items()}


def test_what_it_updates_in_the_parameters_place_is_saved_under_their_names(plait_ranks):
    ((losses, state),) = plait_ranks.run(trained, [Twins()], world=1)
    ((expected, plain),) = plait_ranks.run(trained, [], world=1)
    assert losses == expected
    assert state.keys() == plain.keys()
    assert all(torch.equal(state[key], plain[key]) for key in plain)


def refusals():
    trial, found = Trial(), []
    applied = trial.apply({}, [Twins()])
    applied.optimizer(trial.optimizer)
    for step in (
        lambda: take_step(applied, trial.optimizer(applied.parameters()), trial, 0),
        lambda: take_step(trial.apply({}, [Twins()]), trial.optimizer(applied.parameters()), trial, 0),
        lambda: trial.apply({}, [Wrong()]).optimizer(trial.optimizer),
        lambda: trial.apply({}, [Half()]).optimizer(trial.optimizer),
    ):
        try:
            step()
        except PlaitError as error:
            found.append(str(error))
    return found


def test_another_path_is_refused(plait_ranks):
    ((another, none, wrong, half),) = plait_ranks.run(refusals, world=1)
    assert another == none
    assert another.startswith("strategy 'twins'")
    assert "makes the run's optimizer, and this step got another AdamW" in another
    assert "strategy 'half' returns an optimizer from its hook 'optimizer' whose groups do not name" in half
    assert "from its hook 'optimizer', which must return a torch optimizer, or None" in wrong
