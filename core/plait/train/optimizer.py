"""The optimizer that a config names, and the learning rate as a function of the step."""

import contextlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plait.compose.build import check_options, options_of, target_of
from plait.contract.config import Schedule
from plait.contract.errors import PlaitError, misfit
from plait.parallel.agreement import on_all_ranks
from plait.parallel.state import canonical_state
from plait.system.errors import one_line

if TYPE_CHECKING:
    from plait.train.rehearsal import Build, Groups

FUSED_ON = ("cuda", "cpu", "mps", "xpu")  # devices for which torch has fused kernels
KERNELS = ("fused", "foreach")  # arguments that choose kernels, in torch's optimizers
SMALL = 2**20  # the largest parameter, in elements, on which a step is tried before there are ranks
FITS = "take one that works element by element, such as torch.optim.AdamW, or a layout that divides no parameters"


def make_optimizer(
    node: Mapping[str, Any],
    parameters: Iterable[nn.Parameter],
    values: bool = True,
    schedule: Schedule | None = None,
    saved: bool = True,
) -> torch.optim.Optimizer:
    """The `_target_` of `node` over the parameters, with one group per mesh that they live on. Called by all ranks.

    Fused and foreach kernels process the tensors of a group at once, and torch cannot mix meshes, or DTensors and plain
    tensors, in one call. If the config leaves `fused` and `foreach` open, the first of these kernels that makes a
    correct step on stand-ins for the parameters is used: fused, torch's default, one tensor at a time. Parameters that
    do not train are left out, unless a rank has no others. Raises PlaitError for options that the class refuses, and if
    it makes no correct step on such parameters, ignores a `schedule` that changes the rate, or, if it is `saved`, keeps
    what no checkpoint holds.
    values: whether tensors have values. Without values, as in a plan, any step that runs counts as correct.
    """
    from plait.train.rehearsal import Kind, compare_shards, try_step, try_step_without_values  # no step needs it

    every = list(parameters)
    groups = _by_mesh([param for param in every if param.requires_grad] or every)
    kinds = [list(dict.fromkeys(map(Kind.of, group))) for group in groups]
    cls, options = _target(node)
    exact = getattr(cls, "numerics", "exact") == "exact"  # "own": it differs on purpose
    plainest = _builder(cls, {**options, **{key: False for key in KERNELS if key in _arguments(cls)}})
    for kernels in _candidates(cls, options, groups[0][0].device):
        build = _builder(cls, {**options, **kernels})
        if values:
            problem = _agreed(try_step(build, kinds))
            if problem is None and exact:
                problem = _agreed(compare_shards(build, plainest, kinds))
        else:
            problem = try_step_without_values(build, groups)
        if problem is None:
            if values:
                _check_run(node, build, kinds, schedule, saved)
            return _built(node, build, [{"params": group} for group in groups])
    key = next((name for name in KERNELS if options.get(name) is not None), None)
    error = PlaitError(_sentence(node, options, str(problem)))
    raise error.at(f"optimizer.{key}", options[key], (None,)) if key else error.at("optimizer")


def check_in_one_process(
    node: Mapping[str, Any], parameters: Iterable[nn.Parameter], schedule: Schedule, saved: bool
) -> None:
    """Raises PlaitError if the optimizer of `node` ignores `schedule`, or keeps what no checkpoint holds. For checks of
    a run that do not train with its optimizer."""
    from plait.train.rehearsal import kinds_of

    cls, options = _target(node)
    build = _builder(cls, {**options, **_candidates(cls, options, torch.device("cpu"))[-1]})
    _check_run(node, build, [kinds_of(parameters)], schedule, saved)


def _check_run(
    node: Mapping[str, Any], build: "Build", kinds: list[list[Any]], schedule: Schedule | None, saved: bool
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
    decays = schedule.decay_steps != 0 and schedule.min_lr_ratio != 1
    return schedule.warmup_steps > 1 or decays


def check_optimizer(node: Mapping[str, Any], parameters: Iterable[Tensor]) -> None:
    """A check before there are ranks: raises PlaitError unless the class accepts its options and these shapes.

    Parameters may be on meta. No step is made, because its kernels may need a device that this process lacks.
    """
    from plait.train.rehearsal import Kind

    cls, options = _target(node)
    kernels = _candidates(cls, options, torch.device("cpu"))[-1]
    params = [nn.Parameter(torch.zeros(kind.shape)) for kind in dict.fromkeys(map(Kind.of, parameters))]
    with _without_compiler():
        _built(node, _builder(cls, {**options, **kernels}), [{"params": params}])


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Inside, creating an optimizer does not import torch's compiler. torch imports it only to exclude
    `add_param_group` from compilation, and that takes longer than all other checks."""
    optimizer: Any = torch.optim.Optimizer
    guarded = optimizer.add_param_group
    optimizer.add_param_group = guarded if "torch._dynamo" in sys.modules else inspect.unwrap(guarded)
    try:
        yield
    finally:
        optimizer.add_param_group = guarded


def state_keys(node: Mapping[str, Any], shapes: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], set[str]]:
    """Shape -> the names of the state that this optimizer keeps for a parameter of that shape, found by one step.

    Leaves out large shapes, and shapes that the class refuses.
    """
    cls, options = _target(node)
    build = _builder(cls, {**options, **_candidates(cls, options, torch.device("cpu"))[-1]})
    found = {}
    for shape in {shape for shape in shapes if math.prod(shape) <= SMALL}:
        with contextlib.suppress(Exception):
            only = nn.ParameterList([nn.Parameter(torch.zeros(shape))])
            state, _ = canonical_state(only, build([{"params": list(only)}]))
            found[shape] = {key.removeprefix("optimizer.0.") for key in state if key.startswith("optimizer.0.")}
    return found


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[object, list[nn.Parameter]] = {}
    for param in parameters:
        groups.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
    return list(groups.values())


def _target(node: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(the class, its options). A `fused: null` left over from another optimizer's config is dropped."""
    cls = target_of(node, "optimizer")
    foreign = {key for key in KERNELS if key not in _arguments(cls) and node.get(key) is None}
    own = {key: value for key, value in node.items() if key not in foreign}
    check_options(cls, own, "optimizer", but=("params",))
    options = options_of(own)
    _finite(options, "optimizer")
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


def _built(node: Mapping[str, Any], build: "Build", groups: "Groups") -> Any:
    try:
        made = build(groups)
    except Exception as error:
        said = one_line(error)
        keys = [key for key in node if re.search(rf"\b{re.escape(key)}\b", said)]
        keys = keys or [key for key in node if re.search(rf"(?<![\w.]){re.escape(str(node[key]))}(?![\w.])", said)]
        named = ", ".join(f"optimizer.{key}={node[key]}" for key in keys)
        raise PlaitError(f"{named or 'optimizer'}: {node['_target_']} refuses these options: {said}").at(
            f"optimizer.{keys[0]}" if keys else "optimizer", node[keys[0]] if keys else None
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
    """The rate of step `step` (from 0) of `steps`: linear warm-up, constant, then decay over the last steps."""
    if step < schedule.warmup_steps:
        return lr * (step + 1) / schedule.warmup_steps
    decay_steps = schedule.decay_steps if schedule.decay_steps is not None else steps - schedule.warmup_steps
    start = max(steps - decay_steps, schedule.warmup_steps)
    if step < start or steps <= start:
        return lr
    x = (step - start + 1) / (steps - start)
    shape = {"linear": 1 - x, "cosine": 0.5 * (1 + math.cos(math.pi * x)), "sqrt": 1 - math.sqrt(x)}[schedule.decay]
    return lr * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * shape)
