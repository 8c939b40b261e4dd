"""One traced step of a model with few blocks, taken apart, so that `price` can compute the steps of many layouts.

The trace has blocks with every mode of recomputation. The number of its samples is a multiple of a large prime, so a
size that is also a multiple of the prime grows with the batch, and every other size is fixed. One trace therefore tells
what a rank does for any batch size, any mix of recomputation, and any degrees of the axes that split the batch.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from torch import nn
from torch.distributed.tensor import DTensor

from plait import REMAT, Config, MeshLayout, ModelSpec, Remat
from plait.host import build_model, is_crowded
from plait_plan.cannot import in_words
from plait_plan.memo import Memo
from plait_plan.shelf import Shelf, named_files
from plait_plan.tracing.blocks import Group, block_of, groups, keep
from plait_plan.tracing.documents import told_apart
from plait_plan.tracing.kernels import planned_device
from plait_plan.tracing.recorder import Operator
from plait_plan.tracing.recording import recording
from plait_plan.tracing.trace import levels_of

PRIME = 100_003  # no size of a model is a multiple of it
SHARES = 60  # the number of samples is also a multiple of this, so that many numbers of data ranks can divide it
ENOUGH = 5  # blocks of the largest group; with so many, one trace has every mode of recomputation between neighbours

PartOfStep = tuple[str, str]  # ("forward" or "backward", block), or ("start", ""), ("embed", ""), ("head", ""), ...


@attrs.frozen
class ParamPlacement:
    """Where the parts of one parameter are. block: the FQN of its block, None outside blocks. shape: of the whole
    parameter. divided: for each dim the mesh axes that divide it."""

    block: str | None
    shape: tuple[int, ...]
    divided: tuple[tuple[str, ...], ...]

    def local(self, degrees: Mapping[str, int]) -> int:
        """Elements on the rank that holds the most, if the axes have these degrees."""
        pairs = zip(self.shape, self.divided, strict=True)
        return math.prod(-(-size // math.prod(degrees.get(a, 1) for a in axes)) for size, axes in pairs)


@attrs.frozen(eq=False)
class Pieces:
    """One trace, taken apart. Arrays have one row per operator.

    layout:    the mesh of the trace.
    groups:    the model's groups of equal blocks.
    modes:     traced block -> its mode of recomputation.
    parts:     the part of the step that each operator belongs to.
    operators: in the order of the trace.
    fixed:     bytes, operations and bytes sent that do not depend on the batch.
    more:      bytes, operations and bytes sent that each sample adds.
    levels:    bytes in use by kind, with one sample.
    grows:     bytes in use by kind that each further sample adds.
    tensors:   FQN -> placement of each parameter of the whole model.
    held:      FQNs of the parameters that were traced.
    optimizer: what the optimizer does for the whole model in a layout; None: it is told by what was traced, or unknown.
    """

    layout: MeshLayout
    groups: list[Group]
    modes: dict[str, str]
    parts: list[PartOfStep]
    operators: list[Operator]
    fixed: np.ndarray
    more: np.ndarray
    levels: np.ndarray
    grows: np.ndarray
    tensors: dict[str, ParamPlacement]
    held: tuple[str, ...]
    optimizer: "Pieces | None" = None

    @functools.cached_property
    def places(self) -> dict[PartOfStep, np.ndarray]:
        """Part of the step -> the indices of its operators."""
        return {part: np.array(found) for part, found in _indices(self.parts).items()}

    @functools.cached_property
    def dtypes(self) -> dict[str, list[int]]:
        """dtype -> the indices of the operators of that dtype that have operations."""
        return _indices([o.dtype if o.flops else "" for o in self.operators])

    @functools.cached_property
    def computes(self) -> np.ndarray:
        """Of each operator, whether it takes time of its own: it neither sends nor waits."""
        waits = [o.name.endswith("::wait_tensor") for o in self.operators]
        return np.array([bool(o.bytes) and not (o.kind or w) for o, w in zip(self.operators, waits, strict=True)], bool)

    @functools.cached_property
    def interrupts(self) -> np.ndarray:
        """Of each operator, whether something is sent or waited for before it."""
        named = [
            bool(o.kind) or o.name.endswith("::wait_tensor") or (o.opens and bool(o.bytes)) for o in self.operators
        ]
        return np.array(named, bool)

    @functools.cached_property
    def collectives(self) -> dict[tuple[str, str], list[int]]:
        """(kind, axis) -> the indices of the collectives of that kind over that axis."""
        found = _indices([(o.kind, o.axis) for o in self.operators])
        return {key: places for key, places in found.items() if key[0]}

    @functools.cached_property
    def sums(self) -> dict[tuple[str, str | None], list[int]]:
        """(axis, block or None) -> the indices of the all-reduces of its backward over that axis."""
        named = [
            (o.axis, block or None) if o.kind == "all_reduce" and o.phase == "backward" else None
            for o, (_, block) in zip(self.operators, self.parts, strict=True)
        ]
        found = _indices(named)
        return {key: places for key, places in found.items() if key}

    @functools.cached_property
    def labels(self) -> list[Any]:
        """Equal for traces that consist of the same operators."""
        moved = [(o.name, o.kind, o.axis, bool(o.bytes)) for o in self.operators]
        return [moved, self.parts, self.modes, {fqn: t.divided for fqn, t in self.tensors.items()}]

    @functools.cached_property
    def held_of(self) -> dict[str | None, list[str]]:
        """Block -> FQNs of its parameters that were traced; None -> of all."""
        found: dict[str | None, list[str]] = {block: [] for block in self.modes}
        for fqn in self.held:
            if (block := self.tensors[fqn].block) in found:
                found[block].append(fqn)
        return {**found, None: list(self.held)}

    @functools.cached_property
    def _locals(self) -> dict[Any, dict[str, int]]:
        return {}

    def local(self, degrees: Mapping[str, int]) -> dict[str, int]:
        """FQN -> elements of that parameter on the rank that holds most, if the axes have these degrees."""
        key = tuple(degrees.items())
        if key not in self._locals:
            known: dict[Any, int] = {}
            for one in self.tensors.values():  # most blocks are equal
                if (alike := (one.shape, one.divided)) not in known:
                    known[alike] = one.local(degrees)
            self._locals[key] = {fqn: known[one.shape, one.divided] for fqn, one in self.tensors.items()}
        return self._locals[key]

    @functools.cached_property
    def sends(self) -> bool:
        """Whether the optimizer sends something, such as whole matrices, of which a few blocks tell too little."""
        return any(o.kind and o.phase == "optimizer" for o in self.operators)

    @property
    def partial(self) -> bool:
        return self.sends and self.optimizer is None

    def as_arrays(self) -> dict[str, np.ndarray]:
        """All but the layout, which is known wherever the pieces are asked for."""
        values = {
            "groups": [group.fqns for group in self.groups],
            "modes": self.modes,
            "parts": self.parts,
            "operators": [attrs.astuple(operator) for operator in self.operators],
            "tensors": {fqn: [t.block, t.shape, t.divided] for fqn, t in self.tensors.items()},
            "held": self.held,
        }
        text = np.frombuffer(json.dumps(values).encode(), np.uint8)
        return {"values": text, **{name: getattr(self, name) for name in ARRAYS}}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], layout: MeshLayout) -> "Pieces":
        values: dict[str, Any] = json.loads(arrays["values"].tobytes())
        return cls(
            layout=layout,
            groups=[Group(tuple(fqns)) for fqns in values["groups"]],
            modes=values["modes"],
            parts=[(direction, block) for direction, block in values["parts"]],
            operators=[Operator(*each) for each in values["operators"]],
            tensors={
                fqn: ParamPlacement(block, tuple(shape), tuple(map(tuple, divided)))
                for fqn, (block, shape, divided) in values["tensors"].items()
            },
            held=tuple(values["held"]),
            optimizer=None,
            **{name: arrays[name] for name in ARRAYS},
        )


def _indices(labels: Sequence[Any]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for i, label in enumerate(labels):
        found.setdefault(label, []).append(i)
    return found


ARRAYS = ("fixed", "more", "levels", "grows")


def pieces(
    config: Config,
    layout: MeshLayout,
    strategies: Mapping[str, Mapping[str, Any]],
    granularity: int = 1,
    first: bool = False,
) -> list[Pieces]:
    """The pieces of a step of `config`'s model under `strategies` (name -> options), whose mesh is `layout`.

    granularity: an allocator rounds each size up to a multiple of it. Returns several pieces if a group has too few
    blocks for all modes of recomputation in one trace. first: only the first of them, which has blocks of each kind
    that keep everything. Raises PlaitError for what cannot be planned.
    """
    found: list[Pieces] = []
    for pattern in patterns(config)[: 1 if first else None]:
        key = depends_on(config, layout, strategies, granularity, pattern)
        if (one := kept(key, layout)) is None:
            with in_words(config, strategies):
                one = PIECES.keep(key, _trace(config, layout, strategies, pattern, granularity))
            DISK.keep(key, one.as_arrays())
        found.append(one)
    return found


def kept(key: list[Any], layout: MeshLayout) -> Pieces | None:
    """What this process or its machine has kept."""
    if (one := PIECES.get(key)) is None and (arrays := DISK.get(key)) is not None:
        one = PIECES.keep(key, Pieces.of_arrays(arrays, layout))
    return one


DISK = Shelf("traces")
PIECES = Memo[Pieces](512)
PATTERNS = Memo[list[tuple[str, ...]]](16)


def depends_on(
    config: Config, layout: MeshLayout, strategies: Mapping[str, Any], granularity: int, pattern: Sequence[str]
) -> list[Any]:
    """All inputs of a trace, beside the code that it runs: the key of `PIECES`. The batch size and the number of steps
    are not among them."""
    train = attrs.asdict(config.train)
    for number in ("local_batch_size", "global_batch_size", "steps"):
        del train[number]
    nodes = [config.model, config.optimizer, attrs.asdict(config.precision), attrs.asdict(config.loss), train]
    place = [granularity, is_crowded(), planned_device(config), told_apart(config)]
    return [nodes, attrs.asdict(layout), strategies, *place, list(pattern), named_files([nodes, strategies])]


def patterns(config: Config) -> list[tuple[str, ...]]:
    """How the blocks of each group recompute, in order, in each trace that is needed; the first trace has some that
    keep everything."""
    return PATTERNS.once([config.model, named_files(config.model)], lambda: _patterns(config))


def _patterns(config: Config) -> list[tuple[str, ...]]:
    sizes = [len(g.fqns) for g in groups(*build_model(config.model))] or [ENOUGH]
    if min(sizes) < len(REMAT):
        return [(mode,) * 3 for mode in REMAT]
    if max(sizes) < ENOUGH:
        return [("none", mode, "none", "none") for mode in ("full", "selective")]
    return [("none", "full", "selective", "none", "none")]


def _trace(
    config: Config,
    layout: MeshLayout,
    strategies: Mapping[str, Mapping[str, Any]],
    pattern: Sequence[str],
    granularity: int,
) -> Pieces:
    """Pieces of one traced first step, whose blocks recompute as in `pattern`. What a strategy does in its first step
    alone is planned as if in every step, so it must cost nothing, as views of parameters do."""
    alike: list[Group] = []
    places: dict[str, tuple[int, int]] = {}
    modes: dict[str, str] = {}
    samples = PRIME * math.lcm(SHARES, layout.world_size // math.gcd(layout.world_size, config.train.seq_len))

    def prepare(model: nn.Module, spec: ModelSpec) -> Config:
        alike.extend(groups(model, spec))
        places.update(keep(model, alike, [min(len(g.fqns), len(pattern)) for g in alike]))
        modes.update({fqn: pattern[places[fqn][1]] for fqn in spec.blocks_of(model)})
        return attrs.evolve(
            config,
            remat=Remat("none", blocks=modes),
            train=attrs.evolve(config.train, local_batch_size=samples, global_batch_size=None),
            compile=attrs.evolve(config.compile, enabled=False),
        )

    with recording(config, strategies, layout.world_size, 0, 1, prepare, joined, PRIME) as recorded:
        mesh, model = recorded.applied.mesh, recorded.applied.parts[0]
        recorded.step.optimize()
        recorded.forget()
        recorded.step()
        held = placements(mesh, model, places)
        operators = recorded.recorder.operators
        levels, two = (levels_of(recorded.recorder, sized(n, samples, granularity)) for n in (1, 2))
    return Pieces(
        layout,
        alike,
        modes,
        _parts(operators, modes),
        operators,
        *_of_batch(operators, samples),
        np.array(levels, float),
        np.subtract(two, levels, dtype=float),
        _all(held, alike, places),
        tuple(held),
    )


def sized(rows: int, samples: int, granularity: int) -> Callable[[int], int]:
    """Returns a function from the traced size of memory, with `samples` samples, to its size with `rows` samples."""

    def of(size: int) -> int:
        if size < 0:  # freed: the size with which it was allocated
            return -of(-size)
        size = -(-size * rows // samples) if size % PRIME == 0 else size
        return -(-size // granularity) * granularity

    return of


def _of_batch(operators: list[Operator], samples: int) -> tuple[np.ndarray, np.ndarray]:
    """(fixed, more): bytes, operations and bytes sent of each operator; fixed for any batch, more for each sample."""
    traced = np.array([(o.bytes, o.flops, o.sent) for o in operators], dtype=object)
    grows = [(o.batch, *(n if n % PRIME == 0 else 0 for n in (o.flops, o.sent))) for o in operators]
    batch = np.array(grows, dtype=object)
    return (traced - batch).astype(float), (batch / samples).astype(float)


def _parts(operators: list[Operator], blocks: Mapping[str, str]) -> list[PartOfStep]:
    """The part of the step that each operator belongs to. Operators between two blocks belong to the block before."""
    found: list[PartOfStep] = []
    owner_of = {module: block_of(module, blocks) for module in {o.module for o in operators}}
    owners = [owner_of[o.module] for o in operators]
    in_blocks = [(DIRECTION_OF.get(o.phase), i) for i, o in enumerate(operators) if owners[i]]
    last = {name: max((i for direction, i in in_blocks if direction == name), default=-1) for name in DIRECTIONS}
    now: PartOfStep = ("start", "")
    for i, operator in enumerate(operators):
        direction = DIRECTION_OF.get(operator.phase)
        owner = owners[i]
        if direction is None:
            now = ("end" if operator.phase != "start" else "start", "")
        elif owner is not None:
            now = (direction, owner)
        elif direction == "forward" and (now[0] == "start" or i > last[direction]):
            now = ("embed" if now[0] in ("start", "embed") and i < last[direction] else "head", "")
        elif direction == "backward" and i > last[direction]:
            now = ("tail", "")
        elif direction == "backward" and now[0] not in DIRECTIONS:
            now = ("head", "")
        if operator.phase == "loss":
            now = ("head", "")
        found.append(now)
    return found


DIRECTIONS = ("forward", "backward")
DIRECTION_OF = {"forward": "forward", "loss": "forward", "backward": "backward", "recompute": "backward"}  # a phase


def joined(mesh: Any) -> dict[str, str]:
    """Name of a process group -> the names of the axes that it joins, with `*` between them."""
    return {str(joint.get_group().group_name): "*".join(names) for names, joint in mesh.joined.items()}


def placements(mesh: Any, model: nn.Module, blocks: Mapping[str, Any]) -> dict[str, ParamPlacement]:
    """FQN -> placement of each parameter of `model`."""
    names = {(joint.mesh_dim_names or ("",))[0]: axes for axes, joint in mesh.joined.items()}
    return {fqn: _tensor(p, block_of(fqn, blocks), names) for fqn, p in model.named_parameters()}


def _tensor(param: Any, block: str | None, names: Mapping[str, tuple[str, ...]]) -> ParamPlacement:
    divided: list[tuple[str, ...]] = [()] * param.dim()
    if isinstance(param, DTensor):
        for dim_name, placement in zip(param.device_mesh.mesh_dim_names or (), param.placements, strict=True):
            if not placement.is_replicate() and hasattr(placement, "dim"):
                divided[placement.dim] += names.get(dim_name, (dim_name,))
    return ParamPlacement(block, tuple(param.shape), tuple(divided))


def _all(
    held: Mapping[str, ParamPlacement], alike: list[Group], places: Mapping[str, tuple[int, int]]
) -> dict[str, ParamPlacement]:
    """Placements of all parameters: a block that was not traced has those of an equal block that was."""
    found = {fqn: t for fqn, t in held.items() if t.block is None}
    for number, group in enumerate(alike):
        example = next(fqn for fqn, (g, _) in places.items() if g == number)
        like = {fqn.removeprefix(example): t for fqn, t in held.items() if t.block == example}
        for block in group.fqns:
            found |= {f"{block}{name}": attrs.evolve(t, block=block) for name, t in like.items()}
    return found
