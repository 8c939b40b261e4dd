"""What a step consists of: one trace of a few blocks, taken apart, so that steps of many layouts can be put together.

A trace is made at two batch sizes, with blocks that recompute in each way. All that a rank does is then known for any
batch, any mix of recomputation, and any degrees of the axes that split the batch.
"""

import gc
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from torch.distributed.tensor import DTensor

from plait.contract.axes import Layout
from plait.contract.config import REMAT, Config, Remat
from plait.contract.planned import as_planned
from plait.parallel.apply import new_run, set_up
from plait.parallel.build import build_model
from plait.parallel.simulated import simulated
from plait.plan.blocks import Group, block_of, groups, keep
from plait.plan.fake import fake, forget, materialise_fake
from plait.plan.recorder import Operator, Recorder
from plait.plan.step import Step
from plait.plan.trace import DEVICE, _levels
from plait.plan.traffic import axes_of
from plait.plan.where import Where
from plait.strategies.registry import create_all
from plait.train.optimizer import make_optimizer

ROWS = (2, 1)  # the batch sizes that are traced
ENOUGH = 5  # blocks of a group with which one trace shows every way of recomputation between equal neighbours

Part = tuple[str, str]  # ("forward" or "backward", block), or ("start", ""), ("embed", ""), ("head", ""), ...


@attrs.frozen
class Tensor:
    """How one parameter lies: its shape, and for each dim the mesh axes that divide it. block: where it is."""

    block: str | None
    shape: tuple[int, ...]
    divided: tuple[tuple[str, ...], ...]

    def local(self, degrees: Mapping[str, int]) -> int:
        """Elements on the rank that holds most, with axes of these degrees."""
        pairs = zip(self.shape, self.divided, strict=True)
        return math.prod(-(-size // math.prod(degrees.get(a, 1) for a in axes)) for size, axes in pairs)


@attrs.frozen(eq=False)
class Pieces:
    """One trace, taken apart.

    layout: of the trace. groups: the FQNs of the model's equal blocks. modes: block that was traced -> its way of
    recomputation. parts: where each operator belongs. operators: at one sample; more: bytes, operations and bytes sent
    that one more sample adds to each. levels: of each operator the bytes in use by kind, at one sample; grows: what one
    more adds.
    tensors: FQN -> how each parameter of the whole model lies. held: FQNs of parameters that were traced.
    """

    layout: Layout
    groups: list[Group]
    modes: dict[str, str]
    parts: list[Part]
    operators: list[Operator]
    more: np.ndarray
    levels: np.ndarray
    grows: np.ndarray
    tensors: dict[str, Tensor]
    held: tuple[str, ...]


def pieces(
    config: Config, layout: Layout, strategies: Mapping[str, Mapping[str, Any]], granularity: int = 1
) -> list[Pieces]:
    """The pieces of a step of `config`'s model under `strategies` (name -> options), whose mesh is `layout`.

    granularity: what an allocator rounds sizes up to. Several, if a group has too few blocks to show all ways of
    recomputation at once.
    """
    key = _key(config, layout, strategies, granularity)
    if key not in _made:
        if len(_made) >= CACHED:
            _made.pop(next(iter(_made)))
        _made[key] = _pieces(config, layout, strategies, granularity)
    return _made[key]


CACHED = 256
_made: dict[str, list[Pieces]] = {}


def _key(config: Config, layout: Layout, strategies: Mapping[str, Any], granularity: int) -> str:
    """All that pieces depend on."""
    train = attrs.asdict(config.train)
    for number in ("local_batch_size", "global_batch_size", "steps"):
        del train[number]
    nodes = [config.model, config.optimizer, attrs.asdict(config.precision), train]
    return json.dumps([nodes, attrs.asdict(layout), strategies, granularity], sort_keys=True, default=str)


def _pieces(
    config: Config, layout: Layout, strategies: Mapping[str, Mapping[str, Any]], granularity: int
) -> list[Pieces]:
    model, spec = build_model(config.model)
    found = groups(model, spec)
    fewest = min((len(g.fqns) for g in found), default=ENOUGH)
    patterns: list[tuple[str, ...]] = [("none", "full", "selective", "none", "none")]
    if fewest < ENOUGH:
        patterns = [("none", mode, "none", "none") for mode in ("full", "selective")]
    if fewest < len(REMAT):
        patterns = [(mode,) * 3 for mode in REMAT]
    return [_trace(config, layout, strategies, pattern, granularity) for pattern in patterns]


def _trace(
    config: Config,
    layout: Layout,
    strategies: Mapping[str, Mapping[str, Any]],
    pattern: Sequence[str],
    granularity: int,
) -> Pieces:
    forget()
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it warns of what is slow, not wrong
    with simulated(layout.world_size), as_planned():
        model, spec = build_model(config.model)
        alike = groups(model, spec)
        places = keep(model, alike, [min(len(g.fqns), len(pattern)) for g in alike])
        modes = {fqn: pattern[places[fqn][1]] for fqn in spec.blocks_of(model)}
        config = attrs.evolve(
            config,
            remat=Remat("none", blocks=modes),
            train=attrs.evolve(config.train, local_batch_size=ROWS[0], global_batch_size=None),
            compile=attrs.evolve(config.compile, enabled=False),
        )
        run = new_run(config, spec, model, layout.world_size, DEVICE, create_all(strategies))
        applied = set_up(model, run, fill=False)
        model, names = applied.parts[0], _names(applied.mesh)
        axes = {**axes_of(applied.mesh), **_joined(applied.mesh)}
        collects = gc.isenabled()
        gc.disable()
        try:
            with (
                fake() as mode,
                Where(model) as where,
                Recorder(where, axes, lambda size: -(-size // granularity) * granularity) as recorder,
            ):
                materialise_fake(model, mode, DEVICE)
                recorder.mark([*model.parameters(), *model.buffers()], "parameters")
                optimizer = make_optimizer(config.optimizer, applied.parameters(), values=False)
                step = Step(applied, optimizer, config, recorder, 1, 1)
                steps: list[tuple[list[Operator], list[list[int]]]] = []
                for rows in ROWS:
                    steps.append(_stepped(step, rows, where, recorder))
                if _labels(steps[0][0]) != _labels(steps[1][0]):  # a first step may do what later ones do not
                    steps[0] = _stepped(step, ROWS[0], where, recorder)
                held = {fqn: _tensor(p, block_of(fqn, places), names) for fqn, p in model.named_parameters()}
        finally:
            if collects:
                gc.enable()
    return _apart(layout, alike, modes, steps, _all(config, held, alike, places), tuple(held))


def _stepped(step: Step, rows: int, where: Where, recorder: Recorder) -> tuple[list[Operator], list[list[int]]]:
    where.forget()
    recorder.clear()
    step.rows = rows
    step()
    return recorder.operators, _levels(recorder)


def _apart(layout: Any, alike: Any, modes: Any, steps: Any, tensors: Any, held: Any) -> Pieces:
    (two, levels_two), (one, levels_one) = steps
    if _labels(two) != _labels(one):
        pairs = _matched(two, one)
    else:
        pairs = [(i, i) for i in range(len(one))]
    more = np.zeros((len(one), 3))
    grows = np.zeros((len(one), len(levels_one[0])))
    for i, j in pairs:
        a, b = two[i], one[j]
        more[j] = (a.bytes - b.bytes, a.flops - b.flops, a.sent - b.sent)
        grows[j] = np.subtract(levels_two[i], levels_one[j])
    return Pieces(
        layout, alike, modes, _parts(one, modes), one, more, np.array(levels_one, float), grows, tensors, held
    )


def _labels(operators: list[Operator]) -> list[tuple[str, str, str, str]]:
    return [(o.phase, o.module, o.name, o.axis) for o in operators]


def _matched(two: list[Operator], one: list[Operator]) -> list[tuple[int, int]]:
    import difflib

    matcher = difflib.SequenceMatcher(None, _labels(two), _labels(one), autojunk=False)
    return [(m.a + k, m.b + k) for m in matcher.get_matching_blocks() for k in range(m.size)]


def _parts(operators: list[Operator], blocks: Mapping[str, str]) -> list[Part]:
    """Which part of the step each operator belongs to: what lies between two blocks belongs to the one before it."""
    found: list[Part] = []
    owners = [block_of(o.module, blocks) for o in operators]
    last = {way: max((i for i, o in enumerate(operators) if owners[i] and _way(o) == way), default=-1) for way in WAYS}
    now: Part = ("start", "")
    for i, operator in enumerate(operators):
        way = _way(operator)
        owner = owners[i]
        if way is None:
            now = ("end" if operator.phase != "start" else "start", "")
        elif owner is not None:
            now = (way, owner)
        elif way == "forward" and (now[0] == "start" or i > last[way]):
            now = ("embed" if now[0] in ("start", "embed") and i < last[way] else "head", "")
        elif way == "backward" and i > last[way]:
            now = ("tail", "")
        elif way == "backward" and now[0] not in WAYS:
            now = ("head", "")
        if operator.phase == "loss":
            now = ("head", "")
        found.append(now)
    return found


WAYS = ("forward", "backward")


def _way(operator: Operator) -> str | None:
    return {"forward": "forward", "loss": "forward", "backward": "backward", "recompute": "backward"}.get(
        operator.phase
    )


def _names(mesh: Any) -> dict[str, tuple[str, ...]]:
    """Name of a mesh dim -> the axes that it joins."""
    return {joint.mesh_dim_names[0]: names for names, joint in mesh._joined.items()}


def _joined(mesh: Any) -> dict[str, str]:
    """Name of a process group -> the axes that it joins, with `*` between them."""
    return {str(joint.get_group().group_name): "*".join(names) for names, joint in mesh._joined.items()}


def _tensor(param: Any, block: str | None, names: Mapping[str, tuple[str, ...]]) -> Tensor:
    divided: list[tuple[str, ...]] = [()] * param.dim()
    if isinstance(param, DTensor):
        for dim_name, placement in zip(param.device_mesh.mesh_dim_names or (), param.placements, strict=True):
            if not placement.is_replicate() and hasattr(placement, "dim"):
                divided[placement.dim] += names.get(dim_name, (dim_name,))
    return Tensor(block, tuple(param.shape), tuple(divided))


def _all(
    config: Config, held: Mapping[str, Tensor], alike: list[Group], places: Mapping[str, tuple[int, int]]
) -> dict[str, Tensor]:
    """Those of blocks that were taken out lie as those of the blocks that are like them."""
    found = {fqn: t for fqn, t in held.items() if t.block is None}
    for number, group in enumerate(alike):
        example = next(fqn for fqn, (g, _) in places.items() if g == number)
        like = {fqn.removeprefix(example): t for fqn, t in held.items() if t.block == example}
        for block in group.fqns:
            found |= {f"{block}{name}": attrs.evolve(t, block=block) for name, t in like.items()}
    return found
