"""The optimizer that a config names, over the parameters of this rank."""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from plait.compose.targets import check_options, options_of, target_of
from plait.contract.config import Schedule
from plait.contract.errors import PlaitError, misfit
from plait.parallel.group import ParamGroup, part_of
from plait.system.errors import one_line

if TYPE_CHECKING:
    from plait.train.rehearsal import Build
    from plait.train.rounding import Rounding

FUSED_ON = ("cuda", "cpu", "mps", "xpu")  # devices for which torch has fused kernels
KERNELS = ("fused", "foreach")  # arguments that choose kernels, in torch's optimizers
FITS = "take one that works element by element, such as torch.optim.AdamW, or a layout that divides no parameters"


def make_optimizer(
    node: Mapping[str, Any],
    parameters: Iterable[nn.Parameter] | Iterable[ParamGroup],
    values: bool = True,
    schedule: Schedule | None = None,
    saved: bool = True,
    rounding: "Rounding | None" = None,
) -> torch.optim.Optimizer:
    """The `_target_` of `node` over the parameters, with one group per mesh that they live on. Called by all ranks.

    parameters: plain ones, or groups as `Applied.groups` returns them, which the class gets with all that stands in
    them. `groups` of `node` gives those whose names match a pattern a group of their own, with other options.

    Fused and foreach kernels process the tensors of a group at once, and torch cannot mix meshes, or DTensors and plain
    tensors, in one call. If the config leaves `fused` and `foreach` open, the first of these kernels that makes a
    correct step on stand-ins for the parameters is used: fused, torch's default, one tensor at a time. Parameters that
    do not train are left out, unless a rank has no others. Raises PlaitError for options that the class refuses, a
    pattern that matches no parameter on any rank, and if the class makes no correct step on such parameters, ignores a
    `schedule` that changes the rate, or, if it is `saved`, keeps what no checkpoint holds.
    rounding: how what the optimizer keeps is rounded to bfloat16.
    values: whether tensors have values. Without values, as in a plan, any step that runs counts as correct.
    """
    from plait.train.optimizer_trials import agreed, check_run
    from plait.train.option_groups import check_patterns, divided, groups_by_mesh, options_and_rules  # no step's need
    from plait.train.rehearsal import KindsOfGroup, compare_shards, try_step, try_step_without_values

    node, rules = options_and_rules(node)
    groups = divided(groups_by_mesh(parameters), rules)
    if rules.patterns and values:
        check_patterns(groups, rules.patterns)
    kinds = [KindsOfGroup.of(group) for group in groups]
    cls, options = class_and_options(node)
    exact = getattr(cls, "numerics", "exact") == "exact"  # "own": it differs on purpose
    plainest = builder(cls, {**options, **{key: False for key in KERNELS if key in _arguments(cls)}})
    for kernels in kernels_to_try(cls, options, groups[0]["params"][0].device):
        build = builder(cls, {**options, **kernels})
        if values:
            problem = agreed(try_step(build, kinds))
            if problem is None and exact:
                problem = agreed(compare_shards(build, plainest, kinds))
        else:
            problem = try_step_without_values(build, kinds)
        if problem is None:
            if values:
                check_run(node, build, kinds, schedule, saved)
            optimizer = built(node, build, groups)
            if rounding is not None:
                rounding.attach(optimizer)
            return optimizer
    key = next((name for name in KERNELS if options.get(name) is not None), None)
    error = PlaitError(_sentence(node, options, str(problem)))
    raise error.at(f"optimizer.{key}", options[key], (None,)) if key else error.at("optimizer")


def class_and_options(node: Mapping[str, Any], where: str = "optimizer") -> tuple[Callable[..., Any], dict[str, Any]]:
    """(the class, its options). A `fused: null` left over from another optimizer's config is dropped."""
    cls = target_of(node, "optimizer")
    foreign = {key for key in KERNELS if key not in _arguments(cls) and node.get(key) is None}
    own = {key: value for key, value in node.items() if key not in foreign}
    check_options(cls, own, where, but=("params",))
    options = options_of(own)
    _finite(options, where)
    return cls, options


def _arguments(cls: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(cls).parameters
    except (TypeError, ValueError):  # a class of compiled code
        return {}


def kernels_to_try(cls: Callable[..., Any], options: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """The kernels to try, fastest first; only the user's, if the config sets one."""
    known = [key for key in KERNELS if key in _arguments(cls)]
    if any(options.get(key) is not None for key in KERNELS):
        return [{"fused": False} if "fused" in known and options.get("fused") is None else {}]
    plain = {"fused": False} if "fused" in known else {}
    fused = [{"fused": True}] if "fused" in known and device.type in FUSED_ON else []
    return [*fused, plain, *([{**plain, "foreach": False}] if "foreach" in known else [])]


def builder(cls: Callable[..., Any], options: Mapping[str, Any]) -> "Build":
    return lambda groups: cls(groups, **options)


def built(node: Mapping[str, Any], build: "Build", groups: list[ParamGroup], where: str = "optimizer") -> Any:
    try:
        made = build(groups)
    except Exception as error:
        said = one_line(error)
        if refused := _refused_by_dims(build, groups):
            raise PlaitError(f"{where}: {node['_target_']} refuses {refused}: {said}").at(
                f"{where}._target_", node["_target_"], fits="an optimizer that takes all parameters"
            ) from error
        keys = [key for key in node if re.search(rf"\b{re.escape(key)}\b", said)]
        keys = keys or [key for key in node if re.search(rf"(?<![\w.]){re.escape(str(node[key]))}(?![\w.])", said)]
        named = ", ".join(f"{where}.{key}={node[key]}" for key in keys)
        raise PlaitError(f"{named or where}: {node['_target_']} refuses these options: {said}").at(
            f"{where}.{keys[0]}" if keys else where, node[keys[0]] if keys else None
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise PlaitError(f"optimizer._target_={node['_target_']} made a {type(made).__name__}, not an optimizer").at(
            "optimizer._target_", node["_target_"], fits="an optimizer"
        )
    return made


def _refused_by_dims(build: "Build", groups: list[ParamGroup]) -> str:
    """The parameters that are refused, if those of other numbers of dims are not; "" if that is not why."""

    def taken(dims: int) -> bool:
        try:
            build([part_of(group, own) for group in groups if (own := _of_dims(group, dims))])
        except Exception:  # whatever the class raises for parameters that it does not take
            return False
        return True

    every = sorted({param.dim() for group in groups for param in group["params"]})
    fine = [dims for dims in every if taken(dims)]
    wrong = next((dims for dims in every if dims not in fine), 0)
    if not fine or not wrong:
        return ""
    names = [group["names"][i] for group in groups if "names" in group for i in _of_dims(group, wrong)]
    some = f", such as {names[0]!r}" if names else ""
    return f"parameters of {wrong} dim{'s' * (wrong > 1)}{some}, and takes those of {' or '.join(map(str, fine))} alone"


def _of_dims(group: ParamGroup, dims: int) -> list[int]:
    return [i for i, param in enumerate(group["params"]) if param.dim() == dims]


def _sentence(node: Mapping[str, Any], options: Mapping[str, Any], problem: str) -> str:
    asked = [f"optimizer.{key}={str(options[key]).lower()}" for key in KERNELS if options.get(key) is not None]
    text = f"{', '.join(asked) or 'optimizer'}: {node['_target_']} {problem}"
    if problem.startswith("refuses"):
        return text
    if any(options.get(key) for key in KERNELS):
        return f"{text}; null chooses kernels that work"
    return f"{text}; {FITS}"


def _finite(value: Any, key: str) -> None:
    """Refuses infinite or NaN options of an optimizer: one step would ruin all parameters."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        _finite(each, f"{key}.{name}" if isinstance(value, Mapping) else key)
    if isinstance(value, float) and not math.isfinite(value):
        raise misfit(key, value, "finite")
