"""What is known of an optimizer before ranks start: whether its class takes the options, and what state it keeps."""

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from plait.parallel.group import ParamGroup, part_of
from plait.parallel.state import canonical_state
from plait.system.torch_internals import compiler
from plait.train.optimizer import (
    KERNELS,
    builder,
    built,
    class_and_options,
    kernels_to_try,
)
from plait.train.option_groups import check_known, check_patterns, divided, groups_by_mesh, options_and_rules
from plait.train.rehearsal import KindsOfGroup

if TYPE_CHECKING:
    from plait.train.rounding import Rounding

SMALL = 2**20  # the largest parameter, in elements, on which a step is tried before there are ranks


def check_optimizer(node: Mapping[str, Any], parameters: Iterable[nn.Parameter] | Iterable[ParamGroup]) -> None:
    """A check before there are ranks: raises PlaitError unless the class accepts its options and these shapes, and each
    pattern of `groups` matches a parameter.

    parameters: as for `make_optimizer`, of the whole model; they may be on meta. No step is made, because its kernels
    may need a device that this process lacks.
    """
    node, rules = options_and_rules(node)
    cls, options = class_and_options(node)
    kernels = kernels_to_try(cls, options, torch.device("cpu"))[-1]
    groups = divided(groups_by_mesh(parameters), rules)
    made = []
    for group in map(KindsOfGroup.of, groups):
        made.append(group.with_params([nn.Parameter(torch.zeros(kind.shape)) for kind in group.kinds]))
    if rules.patterns:
        check_patterns(groups, rules.patterns, alone=True)
    for pattern, own in rules.patterns.items():
        _check_own_options(node, pattern, own, made)
    with _without_compiler():
        built(node, builder(cls, {**options, **kernels}), made)


def _check_own_options(node: Mapping[str, Any], pattern: str, own: Mapping[str, Any], groups: list[ParamGroup]) -> None:
    """Raises PlaitError unless the class takes the options `own` for the parameters of a pattern.

    groups: of small stand-ins for the parameters.
    """
    key = f"optimizer.groups.{pattern}"
    cls, options = class_and_options({**node, **own}, key)
    kernels = kernels_to_try(cls, options, torch.device("cpu"))[-1]
    with _without_compiler():
        made = built({**node, **own}, builder(cls, {**options, **kernels}), groups, key)
    check_known(node, pattern, own, set(made.defaults) - set(KERNELS))


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Inside, creating an optimizer does not import torch's compiler. torch imports it only to exclude
    `add_param_group` from compilation, and that takes longer than all other checks."""
    optimizer: Any = torch.optim.Optimizer
    guarded = optimizer.add_param_group
    optimizer.add_param_group = guarded if compiler.is_imported() else inspect.unwrap(guarded)
    try:
        yield
    finally:
        optimizer.add_param_group = guarded


def state_keys(
    node: Mapping[str, Any], groups: Iterable[ParamGroup], rounding: "Rounding | None" = None
) -> dict[str, set[str]]:
    """FQN -> the names of the state that this optimizer keeps for that parameter, found by one step of each kind.

    groups: with names. rounding: of what it keeps. Leaves out large parameters, and those that the class refuses.
    """
    node, rules = options_and_rules(node)
    cls, options = class_and_options(node)
    build = builder(cls, {**options, **kernels_to_try(cls, options, torch.device("cpu"))[-1]})
    known: dict[Any, set[str]] = {}
    found = {}
    for number, group in enumerate(divided(groups, rules)):
        for i, (fqn, param) in enumerate(zip(group["names"], group["params"], strict=True)):
            kind = number, param.shape, tuple(map(str, group["logical"][i]))
            if kind not in known and param.numel() <= SMALL:
                with contextlib.suppress(Exception):
                    only = nn.ParameterList([nn.Parameter(torch.zeros(param.shape))])
                    made = build([{**part_of(group, [i]), "params": list(only)}])
                    if rounding is not None:
                        rounding.attach(made)
                    state, _ = canonical_state(only, made)
                    keys = {key.removeprefix("optimizer.0.") for key in state if key.startswith("optimizer.0.")}
                    known[kind] = keys
            if kind in known:
                found[fqn] = known[kind]
    return found
