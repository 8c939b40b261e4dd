"""The operators of one block, forward and backward, with the tensors that connect them."""

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor, nn

from plait import Config, ModelSpec, Remat
from plait_plan.cannot import in_words
from plait_plan.torch_internals import (
    FakeTensor,
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
    local_part,
    tree_leaves,
    tree_map_only,
)
from plait_plan.tracing.blocks import block_of, groups, keep
from plait_plan.tracing.recorder import Operator, Recorder
from plait_plan.tracing.recording import recording

SEEN = 3  # blocks of a kind that are traced; the middle one lies between equal ones


@attrs.frozen
class Use:
    """Stands for a tensor among the arguments of a call. value: its number."""

    value: int


@attrs.frozen
class Value:
    """A tensor. dtype: as torch's. maker: index of the node that makes it; None: it comes from outside the block."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    maker: int | None

    def bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@attrs.frozen(eq=False)
class Node:
    """One call. func: torch's operator. args, kwargs: with `Use` for tensors. made: numbers of its results.

    call: what the recorder knows of it: phase, module, operations, bytes (0: it is free).
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[int, ...]
    call: Operator

    def used(self) -> list[int]:
        return [leaf.value for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Use)]


@attrs.frozen(eq=False)
class Graph:
    """A block's operators in order.

    block: its FQN. parameters, gradients: name of a parameter -> value. used_outside: values that other operators take.
    """

    block: str
    nodes: list[Node]
    values: dict[int, Value]
    parameters: dict[str, int]
    gradients: dict[str, int]
    used_outside: frozenset[int]

    def enters(self) -> list[int]:
        """Values from outside, without parameters, in order of their first use."""
        own = set(self.parameters.values())
        seen = dict.fromkeys(v for node in self.nodes for v in node.used())
        return [v for v in seen if self.values[v].maker is None and v not in own]

    def leaves(self) -> list[int]:
        """Values that are used outside, without gradients of parameters."""
        own = set(self.gradients.values())
        made = [v for node in self.nodes for v in node.made]
        return [v for v in made if v in self.used_outside and v not in own]


def block_graphs(
    config: Config, strategies: Mapping[str, Mapping[str, Any]], world: int, rows: int, modes: Mapping[int, str]
) -> list[Graph]:
    """One graph for each kind of block, in order: the operators that rank 0 of `world` calls under `strategies` (name
    -> options).

    rows: samples at once per rank. modes: kind -> how its blocks recompute; others keep everything.
    """
    wanted: list[str] = []

    def prepare(model: nn.Module, spec: ModelSpec) -> Config:
        alike = groups(model, spec)
        places = keep(model, alike, [min(len(g.fqns), SEEN) for g in alike])
        recompute = {fqn: modes.get(group, "none") for fqn, (group, _) in places.items()}
        for number in range(len(alike)):
            own = [fqn for fqn, (group, _) in places.items() if group == number]
            wanted.append(own[len(own) // 2])
        train = attrs.evolve(config.train, local_batch_size=rows, global_batch_size=None)
        compile_ = attrs.evolve(config.compile, enabled=False)
        return attrs.evolve(config, train=train, compile=compile_, remat=Remat("none", blocks=recompute))

    with in_words(config, strategies), recording(config, strategies, world, 0, 1, prepare) as made:
        made.step.optimize()
        made.forget()
        model = made.applied.parts[0]
        with _Tap(made.recorder, model) as tap:
            made.step()
        return [tap.graph(block) for block in wanted]


class _Tap(TorchDispatchMode):
    """Writes down which tensors each recorded operator takes and makes."""

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        super().__init__()
        self.recorder = recorder
        self.calls: list[Node] = []
        self.values: dict[int, Value] = {}
        self._numbers: dict[int, int] = {}  # by the id of a tensor
        self._held: list[Tensor] = []
        self.parameters = {fqn: self._number(local_part(p)) for fqn, p in model.named_parameters()}
        self.gradients: dict[str, int] = {}
        for fqn, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda p, fqn=fqn: self._gradient(fqn, p))

    def _gradient(self, fqn: str, param: Any) -> None:
        self.gradients[fqn] = self._number(local_part(param.grad))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is not FakeTensor and is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        before = len(self.recorder.operators)
        result = func(*args, **kwargs)
        if len(self.recorder.operators) != before + 1:
            return result
        given, named = tree_map_only(Tensor, lambda t: Use(self._number(t)), (args, kwargs))
        made = tuple(self._number(t, len(self.calls)) for t in tree_leaves(result) if isinstance(t, Tensor))
        self.calls.append(Node(func, tuple(given), dict(named), made, self.recorder.operators[before]))
        return result

    def _number(self, tensor: Tensor, maker: int | None = None) -> int:
        """The number of `tensor`: the one it has; a new one if it is seen first, or if call `maker` makes or writes to
        it."""
        key = id(tensor)
        if key not in self._numbers or maker is not None:
            self._held.append(tensor)  # so that its id stays its own
            self._numbers[key] = len(self.values)
            self.values[len(self.values)] = Value(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, maker)
        return self._numbers[key]

    def graph(self, block: str) -> Graph:
        """The calls of `block`."""
        inside = [block_of(node.call.module, {block: 0}) is not None for node in self.calls]
        nodes = [node for node, own in zip(self.calls, inside, strict=True) if own]
        place = {i: at for at, i in enumerate(i for i, own in enumerate(inside) if own)}
        seen = {v for node in nodes for v in (*node.used(), *node.made)}
        makers = {v: self.values[v].maker for v in seen}
        values = {
            v: attrs.evolve(self.values[v], maker=None if (m := makers[v]) is None else place.get(m)) for v in seen
        }
        elsewhere = {v for node, own in zip(self.calls, inside, strict=True) if not own for v in node.used()}
        parameters, gradients = (
            {fqn.removeprefix(f"{block}."): v for fqn, v in found.items() if fqn.startswith(f"{block}.") and v in seen}
            for found in (self.parameters, self.gradients)
        )
        return Graph(block, nodes, values, parameters, gradients, frozenset(elsewhere & seen))
