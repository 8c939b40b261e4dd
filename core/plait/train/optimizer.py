"""The optimizer that a config names, and the learning rate as a function of the step."""

import contextlib
import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from plait.compose.build import check_options, options_of, target_of
from plait.contract.config import Schedule
from plait.contract.errors import PlaitError, misfit
from plait.parallel.agreement import on_all_ranks
from plait.parallel.group import ParamGroup, part_of
from plait.parallel.optimizer_groups import mesh_of
from plait.parallel.state import canonical_state
from plait.strategies.blame import blaming
from plait.strategies.registry import create, described
from plait.system.errors import one_line
from plait.system.torch_internals import compiler

if TYPE_CHECKING:
    from plait.train.rehearsal import Build, KindsOfGroup

FUSED_ON = ("cuda", "cpu", "mps", "xpu")  # devices for which torch has fused kernels
KERNELS = ("fused", "foreach")  # arguments that choose kernels, in torch's optimizers
SMALL = 2**20  # the largest parameter, in elements, on which a step is tried before there are ranks
FITS = "take one that works element by element, such as torch.optim.AdamW, or a layout that divides no parameters"


def make_optimizer(
    node: Mapping[str, Any],
    parameters: Iterable[nn.Parameter] | Iterable[ParamGroup],
    values: bool = True,
    schedule: Schedule | None = None,
    saved: bool = True,
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
    values: whether tensors have values. Without values, as in a plan, any step that runs counts as correct.
    """
    from plait.train.rehearsal import KindsOfGroup, compare_shards, try_step, try_step_without_values  # no step's need

    node, patterns = _apart(node)
    groups = _divided(_groups(parameters), patterns)
    if patterns and values:
        _check_patterns(groups, patterns)
    kinds = [KindsOfGroup.of(group) for group in groups]
    cls, options = _target(node)
    exact = getattr(cls, "numerics", "exact") == "exact"  # "own": it differs on purpose
    plainest = _builder(cls, {**options, **{key: False for key in KERNELS if key in _arguments(cls)}})
    for kernels in _candidates(cls, options, groups[0]["params"][0].device):
        build = _builder(cls, {**options, **kernels})
        if values:
            problem = _agreed(try_step(build, kinds))
            if problem is None and exact:
                problem = _agreed(compare_shards(build, plainest, kinds))
        else:
            problem = try_step_without_values(build, kinds)
        if problem is None:
            if values:
                _check_run(node, build, kinds, schedule, saved)
            return _built(node, build, groups)
    key = next((name for name in KERNELS if options.get(name) is not None), None)
    error = PlaitError(_sentence(node, options, str(problem)))
    raise error.at(f"optimizer.{key}", options[key], (None,)) if key else error.at("optimizer")


def _check_run(
    node: Mapping[str, Any], build: "Build", kinds: "list[KindsOfGroup]", schedule: Schedule | None, saved: bool
) -> None:
    from plait.train.optimizer_trials import ignores_schedule, keeps_parts, loses_state

    problem = None
    if schedule is not None and changes_rate(schedule):
        problem = _agreed(ignores_schedule(build, kinds, node["lr"]))
    if problem is None and saved:
        problem = _agreed(loses_state(build, kinds)) or keeps_parts(build, kinds)
    if problem is not None:
        target = node["_target_"]
        raise PlaitError(f"optimizer: {target} {problem}").at("optimizer._target_", target, fits="torch.optim.AdamW")


def changes_rate(schedule: Schedule) -> bool:
    """Whether any two steps of a run may have different rates."""
    if schedule.shape:
        return True
    decays = schedule.decay_steps != 0 and schedule.min_lr_ratio != 1
    return schedule.warmup_steps > 1 or decays


def check_optimizer(node: Mapping[str, Any], parameters: Iterable[nn.Parameter] | Iterable[ParamGroup]) -> None:
    """A check before there are ranks: raises PlaitError unless the class accepts its options and these shapes, and each
    pattern of `groups` matches a parameter.

    parameters: as for `make_optimizer`, of the whole model; they may be on meta. No step is made, because its kernels
    may need a device that this process lacks.
    """
    from plait.train.rehearsal import KindsOfGroup

    node, patterns = _apart(node)
    cls, options = _target(node)
    kernels = _candidates(cls, options, torch.device("cpu"))[-1]
    groups = _divided(_groups(parameters), patterns)
    made = []
    for group in map(KindsOfGroup.of, groups):
        made.append(group.with_params([nn.Parameter(torch.zeros(kind.shape)) for kind in group.kinds]))
    if patterns:
        _check_patterns(groups, patterns, alone=True)
    for pattern, own in patterns.items():
        _check_own_options(node, pattern, own, made)
    with _without_compiler():
        _built(node, _builder(cls, {**options, **kernels}), made)


def _check_own_options(node: Mapping[str, Any], pattern: str, own: Mapping[str, Any], groups: list[ParamGroup]) -> None:
    """Raises PlaitError unless the class takes the options `own` for the parameters of a pattern.

    groups: of small stand-ins for the parameters.
    """
    key = f"optimizer.groups.{pattern}"
    cls, options = _target({**node, **own}, key)
    kernels = _candidates(cls, options, torch.device("cpu"))[-1]
    with _without_compiler():
        made = _built({**node, **own}, _builder(cls, {**options, **kernels}), groups, key)
    from plait.train.option_groups import check_known

    check_known(node, pattern, own, set(made.defaults) - set(KERNELS))


def _check_patterns(groups: list[ParamGroup], patterns: Mapping[str, Any], alone: bool = False) -> None:
    """Raises PlaitError if a pattern matches a parameter on no rank: each may have only some of the model's layers.

    alone: this process has all of them.
    """
    from plait.train.option_groups import refused, unmatched

    group = dist.group.WORLD if dist.is_initialized() and not alone else None
    answers = on_all_ranks(lambda: unmatched(groups, patterns), group=group)
    for pattern in patterns:
        if all(pattern in without for without in answers):
            raise refused(pattern, groups)


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


def state_keys(node: Mapping[str, Any], groups: Iterable[ParamGroup]) -> dict[str, set[str]]:
    """FQN -> the names of the state that this optimizer keeps for that parameter, found by one step of each kind.

    groups: with names. Leaves out large parameters, and those that the class refuses.
    """
    node, patterns = _apart(node)
    cls, options = _target(node)
    build = _builder(cls, {**options, **_candidates(cls, options, torch.device("cpu"))[-1]})
    known: dict[Any, set[str]] = {}
    found = {}
    for number, group in enumerate(_divided(groups, patterns)):
        for i, (fqn, param) in enumerate(zip(group["names"], group["params"], strict=True)):
            kind = number, param.shape, tuple(map(str, group["logical"][i]))
            if kind not in known and param.numel() <= SMALL:
                with contextlib.suppress(Exception):
                    only = nn.ParameterList([nn.Parameter(torch.zeros(param.shape))])
                    state, _ = canonical_state(only, build([{**part_of(group, [i]), "params": list(only)}]))
                    keys = {key.removeprefix("optimizer.0.") for key in state if key.startswith("optimizer.0.")}
                    known[kind] = keys
            if kind in known:
                found[fqn] = known[kind]
    return found


def _groups(parameters: Iterable[Any]) -> list[ParamGroup]:
    """The given groups, or plain parameters that train, or all if none does, with one group per mesh."""
    every = list(parameters)
    if every and isinstance(every[0], Mapping):
        return [dict(group) for group in every]
    groups: dict[object, list[nn.Parameter]] = {}
    for param in [param for param in every if param.requires_grad] or every:
        groups.setdefault(mesh_of(param), []).append(param)
    return [{"params": group} for group in groups.values()]


def _apart(node: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(`node` without its `groups`, pattern -> options of those)."""
    own = {key: value for key, value in node.items() if key != "groups"}
    if node.get("groups") is None:
        return own, {}
    from plait.train.option_groups import patterns_of  # imported only by runs that need it

    return own, patterns_of(node["groups"])


def _divided(groups: Iterable[ParamGroup], patterns: Mapping[str, Mapping[str, Any]]) -> list[ParamGroup]:
    """The groups, each divided by the patterns that match."""
    if not patterns:
        return list(groups)
    from plait.train.option_groups import divided

    return divided(groups, patterns)


def _target(node: Mapping[str, Any], where: str = "optimizer") -> tuple[Callable[..., Any], dict[str, Any]]:
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


def _candidates(cls: Callable[..., Any], options: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """The kernels to try, fastest first; only the user's, if the config sets one."""
    known = [key for key in KERNELS if key in _arguments(cls)]
    if any(options.get(key) is not None for key in KERNELS):
        return [{"fused": False} if "fused" in known and options.get("fused") is None else {}]
    plain = {"fused": False} if "fused" in known else {}
    fused = [{"fused": True}] if "fused" in known and device.type in FUSED_ON else []
    return [*fused, plain, *([{**plain, "foreach": False}] if "foreach" in known else [])]


def _builder(cls: Callable[..., Any], options: Mapping[str, Any]) -> "Build":
    return lambda groups: cls(groups, **options)


def _built(node: Mapping[str, Any], build: "Build", groups: list[ParamGroup], where: str = "optimizer") -> Any:
    try:
        made = build(groups)
    except Exception as error:
        said = one_line(error)
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


def _agreed(problem: str | None) -> str | None:
    """The problem of the first rank that has one, on all ranks."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return next(filter(None, on_all_ranks(lambda: problem, group=group)), None)


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


def learning_rate(schedule: Schedule, lr: float, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up, constant, then decay over the last steps; or what
    the selected schedule says."""
    if schedule.shape:
        return lr * _factor_of_plugin(schedule, step, steps)
    if step < schedule.warmup_steps:
        return lr * (step + 1) / schedule.warmup_steps
    decay_steps = schedule.decay_steps if schedule.decay_steps is not None else steps - schedule.warmup_steps
    start = max(steps - decay_steps, schedule.warmup_steps)
    if step < start or steps <= start:
        return lr
    x = (step - start + 1) / (steps - start)
    shape = {"linear": 1 - x, "cosine": 0.5 * (1 + math.cos(math.pi * x)), "sqrt": 1 - math.sqrt(x)}[schedule.decay]
    return lr * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * shape)


@functools.lru_cache
def _made_schedule(name: str, options: str) -> Any:
    """Once per process: it is asked in every step, for each group of parameters."""
    return create(name, json.loads(options) or {}, "schedule")


def _factor_of_plugin(schedule: Schedule, step: int, steps: int) -> float:
    """What the rate of step `step` (from 0) is multiplied by. Raises PlaitError if that is no number of at least 0."""
    ((name, options),) = schedule.shape.items()
    with blaming(name, "method 'factor'", "schedule"):
        factor = _made_schedule(name, json.dumps(options)).factor(step, steps)
    if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        who, key = described(name, "schedule"), f"schedule.shape.{name}"
        fits = "a finite number of at least 0"
        raise PlaitError(f"{who} returned {factor!r} for step {step} of {steps}, not {fits}").at(key, factor, fits)
    return factor
