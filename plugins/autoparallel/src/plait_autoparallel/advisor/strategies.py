"""How DTensor can compute an operator on ranks along one mesh dim. The only file that uses what torch keeps private.

Needs `DTensorSpec`, `TensorMeta`, `OpSchema`, the propagator of `DTensor._op_dispatcher` with its tables of operators,
`torch.utils._pytree`, and `_schema` of operators, in torch 2.11 to 2.15. Test:
plugins/autoparallel/tests/test_solve.py.

DTensor's sharding propagation answers one question: the inputs lie so; how must they lie, and how does the result? It
is asked for many ways in which the inputs could lie, and each answer is a strategy.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils._pytree import tree_leaves, tree_map

from plait.host import simulated

Strategy = tuple[tuple[Any, ...], tuple[Any, ...]]  # (how each input lies, how each result lies)
EVERY = 3  # with more inputs than this, not all combinations are asked for

# Attention kernels of CPUs, which DTensor does not know: samples and heads are computed apart from each other.
_APART = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 1),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (0, 1),
}


def arguments(node: Any, stand_in: Any) -> Any:
    """The arguments of a graph's node, with `stand_in` for each tensor."""
    return tree_map(lambda leaf: stand_in if hasattr(leaf, "value") else leaf, (node.args, node.kwargs))


class Enumeration:
    """`strategies(node, values)` of a graph's nodes on `size` ranks; equal calls are asked for once.

    unknown: operator -> why DTensor cannot compute it on several ranks.
    """

    def __init__(self, size: int, mesh: DeviceMesh) -> None:
        self.size, self.mesh = size, mesh
        self.unknown: dict[str, str] = {}
        self._propagator = DTensor._op_dispatcher.sharding_propagator
        self._known: dict[Any, list[Strategy] | None] = {}

    def strategies(self, node: Any, values: Any) -> list[Strategy] | None:
        """None if DTensor does not know the operator."""
        inputs = [values[v] for v in node.used()]
        results = [values[v] for v in node.made]
        key = (
            str(node.func),
            str(arguments(node, "tensor")),
            str([(v.shape, v.stride, v.dtype) for v in (*inputs, *results)]),
        )
        if key not in self._known:
            self._known[key] = self._ask(node, inputs, results)
        return self._known[key]

    def _ask(self, node: Any, inputs: list[Any], results: list[Any]) -> list[Strategy] | None:
        if not inputs:  # each rank makes all of it, or its own part
            return [((), tuple(each)) for each in itertools.product(*(self._ways(v, False) for v in results))]
        if node.call.name in _APART:
            ways = ("R", *_APART[node.call.name])
            alike = [((w,) * len(inputs), (w,) * len(results)) for w in ways]
            return [each for each in alike if self._fits(each, inputs, results)]
        answers: dict[Strategy, None] = {}
        why = ""
        with self._results_known(node, results):
            for ways in self._questions(inputs):
                try:
                    answer = self._answer(node, inputs, ways, len(results))
                except Exception as error:  # DTensor says in many ways that it cannot
                    why = why or (str(error).strip().splitlines() or [type(error).__name__])[0]
                    continue
                if answer is not None and self._fits(answer, inputs, results):
                    answers.setdefault(answer)
        if not answers:
            self.unknown[node.call.name] = why or "no strategy divides its tensors evenly"
            return None
        return list(answers)

    def _results_known(self, node: Any, results: list[Any]) -> contextlib.AbstractContextManager[Any]:
        """Inside, DTensor does not run the operator for each question to learn the shapes of its results: that takes
        most of the time, and the graph has them."""
        made = [TensorMeta(torch.Size(v.shape), v.stride, v.dtype) for v in results]
        returns = node.func._schema.returns
        if not hasattr(self._propagator, "_propagate_tensor_meta_non_cached") or len(returns) not in (1, len(made)):
            return contextlib.nullcontext()
        single = len(returns) == 1 and str(returns[0].type) == "Tensor"
        known = made[0] if single else made if len(returns) == 1 else tuple(made)
        return mock.patch.object(self._propagator, "_propagate_tensor_meta_non_cached", return_value=known)

    def _ways(self, value: Any, partial: bool = True) -> list[Any]:
        divided = [d for d, size in enumerate(value.shape) if size and size % self.size == 0]
        summed = ["P"] if partial and value.dtype.is_floating_point else []
        return ["R", *divided, *summed]

    def _questions(self, inputs: list[Any]) -> list[tuple[Any, ...]]:
        each = [self._ways(v) for v in inputs]
        if len(inputs) <= EVERY:
            return list(itertools.product(*each))
        asked: dict[tuple[Any, ...], None] = {}
        for way in dict.fromkeys(w for ways in each for w in ways):
            asked.setdefault(tuple(way if way in ways else "R" for ways in each))
            for i, ways in enumerate(each):
                if way in ways:
                    asked.setdefault(tuple(way if i == j else "R" for j in range(len(each))))
        return list(asked)

    def _answer(self, node: Any, inputs: list[Any], ways: tuple[Any, ...], results: int) -> Strategy | None:
        specs = iter([DTensorSpec(self.mesh, (_placement(w),), TensorMeta(torch.Size(v.shape), v.stride, v.dtype))
                      for v, w in zip(inputs, ways, strict=True)])  # fmt: skip

        def fill(tree: Any) -> Any:
            return tree_map(lambda leaf: next(specs) if hasattr(leaf, "value") else leaf, tree)

        args, kwargs = fill(node.args), fill(node.kwargs)
        info = None
        for table in ("op_to_schema_info", "op_to_schema_info_for_single_dim_strategy"):
            info = info or getattr(self._propagator, table, {}).get(node.func)
        schema = OpSchema(node.func, args, kwargs, info) if info else OpSchema(node.func, args, kwargs)
        sharding = self._propagator.propagate_op_sharding_non_cached(schema)
        asked = schema
        if sharding.needs_redistribute and sharding.redistribute_schema is not None:
            asked = sharding.redistribute_schema
        taken = [s for s in tree_leaves((asked.args_schema, asked.kwargs_schema), is_leaf=_spec) if _spec(s)]
        made: Any = sharding.output_spec
        made = [made] if _spec(made) else list(made or ())
        if len(taken) != len(inputs) or len(made) < results:
            return None
        made = [s for s in made if s is not None][:results]
        ways_in, ways_out = ([_way(s.placements[0]) for s in specs] for specs in (taken, made))
        if None in ways_in or None in ways_out or len(ways_out) != results:
            return None
        return tuple(ways_in), tuple(ways_out)

    def _fits(self, answer: Strategy, inputs: list[Any], results: list[Any]) -> bool:
        pairs = zip((*inputs, *results), (*answer[0], *answer[1]), strict=True)
        return all(not isinstance(w, int) or (w < len(v.shape) and v.shape[w] % self.size == 0) for v, w in pairs)


def _spec(leaf: Any) -> bool:
    return isinstance(leaf, DTensorSpec)


def _placement(way: Any) -> Any:
    return Shard(way) if isinstance(way, int) else Partial() if way == "P" else Replicate()


def _way(placement: Any) -> Any:
    """None for what the advisor does not use: strided shards, and results that are neither summed nor averaged."""
    if placement.is_replicate():
        return "R"
    if type(placement) is Shard:
        return placement.dim
    if type(placement) is Partial and placement.reduce_op in ("sum", "avg"):
        return "P"
    return None


@contextlib.contextmanager
def enumerations(sizes: list[int]) -> Iterator[list[Enumeration]]:
    """One for each mesh dim of these sizes; dims of one size share theirs."""
    made: dict[int, Enumeration] = {}
    for size in dict.fromkeys(sizes):
        with simulated(size):
            made[size] = Enumeration(size, init_device_mesh("cpu", (size,)))
    with simulated(max(sizes, default=1)):
        yield [made[size] for size in sizes]
