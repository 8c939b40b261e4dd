"""Wire forms: what travels between ranks in the place of a parameter, and what modules then compute with."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plait.contract.errors import PlaitError
from plait.strategies.registry import described

_FORMS = "_wire_forms"  # in the `__dict__` of a module: name of a parameter -> its form


class WireForm(Protocol):
    """What a parameter is between ranks, such as float8. Both methods are called without gradients."""

    def to_wire(self, stored: Tensor, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """Returns (sent, kept). What is sent is contiguous and has the shape of this rank's part, which may have no
        elements. What is kept is for `from_wire`, on this rank: the same on all ranks that gather from each other.

        stored: the parameter as this rank stores it, a DTensor if it is divided. dtype: what modules compute in.
        """

    def from_wire(self, gathered: Tensor, kept: Any, dtype: torch.dtype) -> Tensor:
        """The values, a plain tensor in `dtype`, of the part of `gathered` that this rank has.

        gathered: what the ranks sent, put together; a DTensor if another strategy divides the parameter too.
        """


def set_wire_form(module: nn.Module, name: str, form: WireForm) -> None:
    """Let the parameter `name` of `module` itself travel as `form`: in phase "model", for one that is not tied.

    Raises AttributeError if there is no such parameter, and PlaitError if it has a form.
    """
    module.get_parameter(name)
    if module.__dict__.setdefault(_FORMS, {}).setdefault(name, form) is not form:
        raise PlaitError(
            f"{name!r} of a {type(module).__name__} gets a second wire form: select only one strategy that sets one"
        )


def take_wire_form(module: nn.Module, name: str) -> WireForm | None:
    """The form of this parameter, for the one caller that sends it so; None: it has none, or it was taken."""
    return module.__dict__.get(_FORMS, {}).pop(name, None)


def in_wire_form(param: Any, form: WireForm, dtype: torch.dtype) -> Tensor:
    """`param` with the values that `form` makes of it, if nothing is sent; the gradient is that of `param`."""
    with torch.no_grad():
        sent, kept = form.to_wire(param.detach(), dtype)
        values = form.from_wire(_placed(sent, param), kept, dtype)
    local = param.to_local() if isinstance(param, DTensor) else param
    return _placed(_Values.apply(local, values), param)


def check_not_tied(model: nn.Module) -> None:
    """Raises PlaitError if a parameter with a form has a second place, where it would have other values."""
    names: dict[int, list[str]] = {}
    for fqn, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(fqn)
    for fqn, param in _with_forms(model):
        if others := [each for each in names[id(param)] if each != fqn]:
            raise PlaitError(f"{fqn!r} has a wire form and is tied to {others[0]!r}: only one that is not tied may")


def check_all_taken(models: Iterable[nn.Module], claims: str | None) -> None:
    """Raises PlaitError if a form was set too late, or the strategy `claims`, which shards parameters, left it."""
    if left := [fqn for model in models for fqn, _ in _with_forms(model)]:
        why = f"{described(claims)} shards parameters and did not take it" if claims else "phase 'model' was over"
        raise PlaitError(
            f"nothing is sent in the wire form of {left[0]!r}: {why}, so the run would compute with other values than "
            "one process; take each form by plait.take_wire_form, or select only one of the two strategies"
        )


def _with_forms(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"{fqn}.{name}".lstrip("."), module.get_parameter(name))
        for fqn, module in model.named_modules()
        for name in module.__dict__.get(_FORMS, {})
    ]


class _Values(torch.autograd.Function):
    """Returns `values`; their gradient is that of `param`."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, values: Tensor) -> Tensor:
        ctx.dtype = param.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype), None


def _placed(local: Tensor, param: Any) -> Any:
    """`local` as the part of a DTensor that lies as `param`, if that is one."""
    if not isinstance(param, DTensor):
        return local
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())
