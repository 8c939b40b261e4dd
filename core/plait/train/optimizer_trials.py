"""Tries on stand-ins what a run asks of an optimizer beside a step: that it follows the schedule, and that a checkpoint
holds all that it keeps."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plait.contract.config import Schedule
from plait.contract.errors import PlaitError
from plait.parallel.agreement import on_all_ranks
from plait.parallel.outside_state import own_attributes
from plait.parallel.stand_in import undisturbed
from plait.parallel.state import canonical_state, mark
from plait.train.rehearsal import Build, Kind, KindsOfGroup, drawn, every_kind
from plait.train.schedule import changes_rate

BEFORE, AFTER = 2, 12  # steps before a checkpoint, and after it: state that is used every few steps shows too
OFF = 1e-6  # of the way: how far two optimizers may be apart that go on from the same state
Groups = list[KindsOfGroup]


def check_run(node: Mapping[str, Any], build: Build, kinds: Groups, schedule: Schedule | None, saved: bool) -> None:
    """Raises PlaitError if the class ignores a `schedule` that changes the rate or, if it is `saved`, keeps what no
    checkpoint holds. Collective."""
    problem = None
    if schedule is not None and changes_rate(schedule):
        problem = agreed(ignores_schedule(build, kinds, node["lr"]))
    if problem is None and saved:
        problem = agreed(loses_state(build, kinds)) or keeps_parts(build, kinds)
    if problem is not None:
        target = node["_target_"]
        raise PlaitError(f"optimizer: {target} {problem}").at("optimizer._target_", target, fits="torch.optim.AdamW")


def agreed(problem: str | None) -> str | None:
    """The problem of the first rank that has one, on all ranks."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return next(filter(None, on_all_ranks(lambda: problem, group=group)), None)


def ignores_schedule(build: Build, groups: Groups, lr: float) -> str | None:
    """What is wrong, in words, if a learning rate that is set in `param_groups`, as the schedule does, changes nothing.

    The first step is made with `lr`, the next two with that or with half of it: one may be a step late, as ASGD is.
    """

    def thirds(dtype: torch.dtype | None) -> list[tuple[Kind, Tensor, Tensor, Tensor]]:
        ends = []
        for factor in (1.0, 0.5):
            stand_ins = _StandIns(build, groups, dtype)
            before = stand_ins.step(1, lr)
            stand_ins.step(2, factor * lr)
            ends.append((before, stand_ins.step(3, factor * lr)))
        (before, whole), (_, half) = ends
        return list(zip(stand_ins.kinds, before, whole, half, strict=True))

    for kind, before, whole, half in _tried(groups, thirds) or []:
        if torch.equal(whole, half) and not torch.equal(before, whole):
            return (
                f"makes the same step on {kind} whatever `lr` its param_groups say, so the schedule would change "
                "nothing: let step() read group['lr'], or take a constant rate by schedule.warmup_steps=0 "
                "schedule.decay_steps=0"
            )
    return None


def loses_state(build: Build, groups: Groups) -> str | None:
    """What is wrong, in words, if an optimizer goes on differently after its checkpoint has been loaded.

    It does if it keeps anything elsewhere than in `state`, by parameter.
    """
    wrong: list[str] = []

    def both(dtype: torch.dtype | None) -> list[tuple[Kind, Tensor, Tensor, Tensor]]:
        one = _StandIns(build, groups, dtype)
        told = _contents(one.optimizer)
        for step in range(1, BEFORE + 1):
            start = one.step(step)
        saved = {key: t.clone() for key, t in canonical_state(one.params, one.optimizer)[0].items()}
        other = _StandIns(build, groups, dtype)
        state, after = canonical_state(other.params, other.optimizer)
        for key, tensor in state.items():
            if key in saved:
                tensor.copy_(saved[key])
                mark(tensor, False)
        after()
        ends = []
        for stand_ins in (one, other):
            torch.manual_seed(0)
            for step in range(BEFORE + 1, BEFORE + AFTER + 1):
                end = stand_ins.step(step)
            ends.append(end)
        wrong[:] = [where for where, value in _contents(one.optimizer).items() if told.get(where) != value]
        return list(zip(one.kinds, start, *ends, strict=True))

    try:
        tried = _tried(groups, both) or []
    except PlaitError as error:
        return f"cannot be saved: {error}"
    for _, start, went_on, resumed in tried:
        way, off = float((went_on - start).norm()), float((went_on - resumed).norm())
        if not torch.equal(went_on, resumed) and not off <= OFF * way:
            where = f" (it changes {', '.join(wrong)})" if wrong else ""
            return (
                f"goes on differently after a checkpoint is loaded{where}: a checkpoint holds only what it keeps in "
                "`state` by parameter, as tensors or numbers; keep all of it there, or set checkpoint.enabled=false"
            )
    return None


def keeps_parts(build: Build, groups: Groups) -> str | None:
    """What is wrong, in words, if an optimizer keeps of a sharded parameter a plain tensor that differs between ranks:
    of plain tensors a checkpoint holds one rank's. Collective."""
    kept: dict[tuple[Any, ...], str] = {}
    kinds = every_kind(groups)

    def once(dtype: torch.dtype | None) -> None:
        stand_ins = _StandIns(build, groups, dtype, placed=True)
        stand_ins.step(1)
        for seed, param in enumerate(stand_ins.params):
            for key, value in stand_ins.optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor) and not isinstance(value, DTensor):
                    kept[seed, str(kinds[seed]), kinds[seed].logical, kinds[seed].shape, key] = _digest(value)

    if any(kind.sharded for kind in kinds):
        _tried(groups, once)
    group = dist.group.WORLD if dist.is_initialized() else None
    seen: dict[tuple[Any, ...], str] = {}
    for own in on_all_ranks(lambda: kept, group=group):
        for what, digest in own.items():
            if seen.setdefault(what, digest) != digest:
                return (
                    f"keeps {what[-1]!r} of {what[1]} as a plain tensor that differs between ranks, of which a "
                    "checkpoint holds one: make it a DTensor, such as torch.zeros_like(parameter), or set "
                    "checkpoint.enabled=false"
                )
    return None


class _StandIns:
    """An optimizer over a stand-in for each kind of parameter: whole, or `placed` as parameters are."""

    def __init__(self, build: Build, groups: Groups, dtype: torch.dtype | None, placed: bool = False) -> None:
        torch.manual_seed(0)
        self.dtype, self.placed = dtype, placed
        self.kinds = every_kind(groups)
        self.params = nn.ParameterList(nn.Parameter(self._value(seed, 0)) for seed in range(len(self.kinds)))
        rest = iter(self.params)
        self.optimizer = build([group.with_params([next(rest) for _ in group.kinds]) for group in groups])

    def step(self, number: int, lr: float | None = None) -> list[Tensor]:
        """Make step `number`, as a run does; returns copies of the parameters after it."""
        for seed, param in enumerate(self.params):
            param.grad = self._value(seed, number)
        if lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [param.detach().clone() for param in self.params]

    def _value(self, seed: int, step: int) -> Tensor:
        kind = self.kinds[seed]
        value = drawn(kind, seed, step).to(self.dtype or kind.dtype)
        return kind.place(value) if self.placed else value.to(kind.device)


def _tried(groups: Groups, trial: Callable[[torch.dtype | None], Any]) -> Any:
    """What `trial` returns in float64, or in the parameters' own dtypes if the optimizer takes no float64; None if it
    fails: whether it makes a step has been tried before."""
    for dtype in (torch.float64, None):
        try:
            with undisturbed(every_kind(groups)[0].device):
                return trial(dtype)
        except PlaitError:
            raise
        except Exception:
            continue
    return None


def _contents(optimizer: Any) -> dict[str, Any]:
    """What stands in the attributes and the groups of `optimizer`, other than `state` and parameters: a digest each."""
    digests = {f"its {name!r}": _digest(value) for name, value in own_attributes(optimizer).items()}
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key not in ("params", "lr"):
                digests[f"{key!r} of its param_groups"] = digests.get(f"{key!r} of its param_groups", "") + _digest(
                    value
                )
    return digests


def _digest(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.detach().cpu().tolist()}"
    if isinstance(value, dict):
        return ", ".join(_digest(each) for each in value.values())
    if isinstance(value, list | tuple | set):
        return ", ".join(map(_digest, value))
    if isinstance(value, torch.optim.Optimizer):
        return _digest(value.state) + _digest(value.param_groups)
    return repr(value) if isinstance(value, int | float | str | bool | None) else ""
