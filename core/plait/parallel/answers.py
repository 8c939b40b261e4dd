"""The required answers of hooks. A wrong answer is refused where it is given, with its strategy's name."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.contract.axes import MeshAxis, MeshView
from plait.contract.choices import Choice
from plait.contract.exact import Misfit
from plait.contract.model_spec import ModelSpec
from plait.parallel.clip import plain
from plait.parallel.own_state import RESERVED
from plait.strategies.hooks import Hooks, Required


def _list_of(kind: Any, answer: Any) -> list[Any]:
    items: list[Any] = list(answer) if isinstance(answer, Iterable) else [None]
    if not all(isinstance(item, kind) for item in items):
        raise Misfit
    return items


def _of(kind: Any, answer: Any) -> Any:
    if not isinstance(answer, kind | None):
        raise Misfit
    return answer


def _export(answer: Any) -> Any:
    from plait.contract.exported import Export  # made once, at the end of a run

    return _of(Export, answer)


def _modules(answer: Any) -> nn.Module | list[nn.Module] | None:
    several = isinstance(answer, list) and answer and all(isinstance(item, nn.Module) for item in answer)
    return answer if several else _of(nn.Module, answer)


def _done(answer: Any) -> bool | None:
    if answer is not None and answer is not True:
        raise Misfit
    return answer


def _dealt(answer: Any) -> tuple[Tensor, Tensor, Tensor | None] | None:
    if answer is None:
        return None
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise Misfit
    tokens, labels, positions = answer
    tensors = (tokens, labels) if positions is None else (tokens, labels, positions)
    if not all(isinstance(x, Tensor) and x.shape == tokens.shape for x in tensors):
        raise Misfit
    return answer


def _stage_plan(answer: Any) -> Any:
    from plait.contract.stage_plan import StagePlan  # only plans have one

    if not isinstance(answer, StagePlan | None):
        raise Misfit
    return answer


def _norm(answer: Any) -> Tensor | None:
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = torch.tensor(float(answer))
    if answer is not None and not (isinstance(answer, Tensor) and answer.numel() == 1 and not answer.is_complex()):
        raise Misfit
    return None if answer is None else plain(answer).reshape(())


def _tensors(answer: Any, reserved: tuple[str, ...] = ()) -> Any:
    if not isinstance(answer, dict) or any(str(key).startswith(reserved) for key in answer):
        raise Misfit
    if not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in answer.items()):
        raise Misfit
    return answer


def _own_state(answer: Any) -> Any:
    return None if answer is None else _tensors(answer)


def _state(answer: Any) -> Any:
    state, then = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    if state is None and then is None:
        return None
    if not (then is None or callable(then)):
        raise Misfit
    return _tensors(state, RESERVED), then


ANSWERS = {
    "extend": Required("a ModelSpec, or None if it added nothing", partial(_of, ModelSpec)),
    "build_mesh": Required("a list of MeshAxis and MeshView", partial(_list_of, MeshAxis | MeshView)),
    "choices": Required("a list of Choice", partial(_list_of, Choice)),
    "parallelize": Required("a torch module, or None after a change in place, or in phase 'stages' a list", _modules),
    "compile": Required("a torch module, or None for the core's default", partial(_of, nn.Module)),
    "deal": Required("tokens, labels and positions of one shape, or None for the core's default", _dealt),
    "forward_backward": Required("True, or None for the core's default", _done),
    "plan_stages": Required("a StagePlan, or None", _stage_plan),
    "optimizer": Required("a torch optimizer, or None for the core's default", partial(_of, torch.optim.Optimizer)),
    "clip_grads": Required("the total norm as a tensor of one element, or None for the core's default", _norm),
    "export": Required("a plait.Export, or None for the core's default", _export),
    "checkpoint": Required(
        "a dict of tensors by name (none begins with 'strategy.', 'observer.' or 'replica.', which are reserved), or "
        "that and a function, or None for the core's default",
        _state,
    ),
    "state": Required("a dict of tensors by name, or None", _own_state),
}


def hooks_of(strategies: Mapping[str, Any]) -> Hooks:
    """The hooks of these strategies, name -> instance, without the core's own answers.

    Raises PlaitError for strategies that do not go together.
    """
    return Hooks(strategies, ANSWERS)
