"""The live state of a model and its optimizer under canonical names: the core's answer to the hook `checkpoint`."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plait.contract.errors import PlaitError
from plait.parallel.group import part_of
from plait.system.torch_internals.modules import without_hooks

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # what torch's own wrappers add to a name
_ABSENT, _FREE = "_plait_absent", "_plait_may_be_infinite"


def canonical(name: str) -> str:
    """`name` without what torch's wrappers added to it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def canonical_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """(state, after): a flat dict of tensors that alias the live ones, and a function to call after loading into it.

    `model.<fqn>`:           parameters and persistent buffers; a tied one once, under its first name.
    `optimizer.<fqn>.<key>`: the optimizer's state of that parameter. A number becomes a 0-d tensor. State that the
                             optimizer has not created yet is an absent tensor (`is_absent`): `load` fills it if the
                             checkpoint has it, `after` then gives it to the optimizer, and it is never saved. So
                             neither saving nor loading before the first step changes what that step does.

    The optimizer may update other tensors in the place of parameters, such as shards of them: a group's `names` say
    whose each is. Learning rates and other hyper-parameters are not state: they follow from the config and the step.
    Call it again for every save and load: strategies may give a parameter other storage meanwhile.
    Raises PlaitError for state that is not a tensor or number, and for an optimizer that keeps it elsewhere.
    """
    names, state = _names(model), {}
    for tensor, fqn in names.values():
        state[f"model.{fqn}"] = tensor.detach()
        if not isinstance(tensor, nn.Parameter):
            free_to_be_infinite(state[f"model.{fqn}"])
    if optimizer is None:
        return state, lambda: None
    from plait.parallel.outside_state import attribute_outside_state  # no step needs it

    if (attribute := attribute_outside_state(optimizer)) is not None:
        raise PlaitError(_elsewhere(optimizer, repr(attribute)))
    writes: list[Callable[[], None]] = []
    here = {fqn for _, fqn in names.values()}
    for group in optimizer.param_groups:
        for i, param in enumerate(group["params"]):
            given = group["names"][i] if "names" in group else ""
            fqn = names[id(param)][1] if id(param) in names else given
            if fqn in here and (param.requires_grad or optimizer.state.get(param)):
                own, write = _state_of(optimizer, group, i, fqn)
                state |= own
                writes.append(write)

    def after() -> None:
        for write in writes:
            write()

    return state, after


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """FQN -> shape of the model's part of a checkpoint; `model` may be on the meta device."""
    return {fqn: tuple(tensor.shape) for tensor, fqn in _names(model).values()}


def integers(model: nn.Module) -> set[str]:
    """FQNs of the model's buffers that hold no floating-point numbers."""
    return {fqn for tensor, fqn in _names(model).values() if not tensor.is_floating_point()}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further FQN of a tied parameter -> its first, under which it is saved."""
    names = _names(model)
    firsts = {canonical(key): names[id(t)][1] for key, t in model.state_dict(keep_vars=True).items()}
    return {fqn: first for fqn, first in firsts.items() if fqn != first}


def weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """FQN -> tensor of the model alone."""
    return {key.removeprefix("model."): tensor for key, tensor in state.items() if key.startswith("model.")}


def is_absent(tensor: Tensor) -> bool:
    """Whether this is optimizer state that does not exist yet: room for what a checkpoint may have."""
    return getattr(tensor, _ABSENT, False)


def twin_of(tensor: Tensor) -> Tensor:
    """An empty tensor that a checkpoint treats as it treats this one, to be saved in its place."""
    twin = torch.empty_like(tensor)
    for note in (_ABSENT, _FREE):
        if hasattr(tensor, note):
            setattr(twin, note, getattr(tensor, note))
    return twin


def is_loaded(tensor: Tensor) -> bool:
    """Whether this very tensor, of a state or of what the hook `state` returns, was filled from a checkpoint."""
    return getattr(tensor, _ABSENT, None) is False


def is_canonical(key: str) -> bool:
    """Whether `key` is the model's or the optimizer's, which every checkpoint has; others are a strategy's own."""
    return key.startswith(("model.", "optimizer."))


def may_be_infinite(tensor: Tensor) -> bool:
    """Whether infinity is allowed here: in buffers (masks), in an optimizer's plain numbers (the best so far), and in
    what strategies keep beside parameters."""
    return getattr(tensor, _FREE, False)


def free_to_be_infinite(tensor: Tensor) -> None:
    setattr(tensor, _FREE, True)


def mark(tensor: Tensor, absent: bool) -> None:
    setattr(tensor, _ABSENT, absent)


def forget_loading(tensor: Tensor) -> None:
    """From now on this tensor was not filled from a checkpoint."""
    if is_loaded(tensor):
        delattr(tensor, _ABSENT)


def _names(model: nn.Module) -> dict[int, tuple[Tensor, str]]:
    """id -> (tensor, its first FQN). Calls `state_dict`, whose hooks let sharding free gathered parameters first."""
    names: dict[int, tuple[Tensor, str]] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or key.endswith("_extra_state"):
            raise PlaitError(f"{key!r} of the model is not a parameter or buffer, and a checkpoint holds only these")
        names.setdefault(id(tensor), (tensor, canonical(key)))
    return names


def _elsewhere(optimizer: Any, what: str) -> str:
    return (
        f"{type(optimizer).__name__} keeps {what} of its parameters elsewhere than in `state`, so a checkpoint would "
        "lack it: keep it in `state[parameter]`"
    )


def _state_of(
    optimizer: Any, group: Mapping[str, Any], number: int, fqn: str
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """(entries of one parameter of `group`, what writes back or installs them after loading)."""
    param = group["params"][number]
    kept = optimizer.state.get(param)
    absent = not kept
    kept = kept or _first_state(optimizer, group, number, fqn)
    own: dict[str, Tensor] = {}
    for key, value in kept.items():
        if isinstance(value, Tensor):
            own[key] = value.detach()
        elif isinstance(value, int | float):
            own[key] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
            free_to_be_infinite(own[key])
        elif value is not None:
            kind = type(value).__name__
            raise PlaitError(f"{type(optimizer).__name__} keeps {key!r} of {fqn!r} as a {kind}, which cannot be saved")
        if absent and key in own:
            mark(own[key], True)

    def write() -> None:
        if any(is_absent(tensor) for tensor in own.values()):
            return  # the checkpoint has none either
        for key, tensor in own.items():
            if not isinstance(kept[key], Tensor):
                kept[key] = type(kept[key])(tensor.item())
        if absent and own:
            optimizer.state[param] = kept

    return {f"optimizer.{fqn}.{key}": tensor for key, tensor in own.items()}, write


def _first_state(optimizer: Any, group: Mapping[str, Any], number: int, fqn: str) -> dict[str, Any]:
    """The state that `optimizer` would keep of a parameter after a step: from a step of a copy of it on a stand-in.

    torch has no public way to create it. A step with learning rate 0 on the real ones would count as a step, decay
    momenta, run hooks, and with eps=0 make parameters NaN. Only keys, dtypes and layout are used, not values.
    """
    from plait.parallel.stand_in import stand_in, undisturbed

    param = group["params"][number]
    like = stand_in(torch.zeros_like(param), torch.zeros_like(param))
    spare = object.__new__(type(optimizer))
    spare.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})  # a patched one
    spare.state = defaultdict(dict)
    spare.param_groups = [{**part_of(dict(group), [number]), "params": [like]}]
    without_hooks(spare)
    try:
        with undisturbed(param.device):
            spare.step()
    except Exception as error:  # such as KeyError: it looks a parameter up in a table of its own
        raise PlaitError(
            f"{_elsewhere(optimizer, 'something')}; a step on a stand-in for {fqn!r} raises {type(error).__name__}"
        ) from error
    return dict(spare.state[like])
