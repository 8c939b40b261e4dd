"""Everything that one rank does in a step: its operators, its collectives, and what lives in memory meanwhile."""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from plait.plan.traffic import SPACES, group_of, kind_of, moved
from plait.plan.where import Where

_aten = torch.ops.aten
# Kernels of CPUs that torch has no formula for -> those of GPUs, which compute the same.
_LIKE = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
_SILENT = ("prim::device", "profiler::")  # questions about a tensor, and remarks for a profiler
_FREE = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")


@attrs.define(eq=False, slots=True)
class Storage:
    """Memory of one or several tensors.

    copies: whether it was made of parameters alone. travels: whether a collective reads or writes it.
    resized: whether its size was changed from outside of operators, as FSDP2 does with what it gathered.
    """

    size: int
    phase: str
    module: str
    micro: int
    kind: str | None = None
    copies: bool = False
    travels: bool = False
    resized: bool = False
    kept: bool = False


@attrs.frozen(slots=True)
class Operator:
    """One call. sent: bytes that a collective moves; 0: it is none."""

    phase: str
    micro: int
    module: str
    name: str
    flops: int
    bytes: int
    dtype: str
    kind: str = ""
    axis: str = ""
    sent: int = 0


class Recorder(TorchDispatchMode):
    """`with Recorder(where, axes, rounded) as recorder:` around all that makes tensors.

    axes: name of a process group -> mesh axis. rounded: what an allocator makes of a size.
    phase, micro: set by who drives the step: what runs, and for which micro-batch.
    operators: in order. changes: (number of the operator after which it is so, storage, bytes more or less).
    """

    def __init__(self, where: Where, axes: Mapping[str, str], rounded: Callable[[int], int] = int) -> None:
        super().__init__()
        self.where, self.axes, self.rounded = where, axes, rounded
        self.phase, self.micro = "start", 0
        self.paused = False
        self.live: dict[int, Storage] = {}
        self.clear()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # a compiler that traces meanwhile is not part of the step; the graph that it makes is

    def clear(self) -> None:
        """Forget what happened, not what lives."""
        self.operators: list[Operator] = []
        self.changes: list[tuple[int, Storage, int]] = []
        self.before = list(self.live.values())
        self.sizes_before = {id(storage): storage.size for storage in self.before}

    def __enter__(self) -> "Recorder":
        """Two things that no dispatch mode sees are watched by replacing a function of torch until the end: storages
        that change their size, and operators that DTensor calls only to learn the shape of what it would return."""
        self._replaced: list[tuple[Any, str, Any]] = [(torch.UntypedStorage, "resize_", torch.UntypedStorage.resize_)]
        torch.UntypedStorage.resize_ = self._resized(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
        for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
            if plain := getattr(ShardingPropagator, name, None):
                self._replaced.append((ShardingPropagator, name, plain))
                setattr(ShardingPropagator, name, self._unseen(plain))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for owner, name, plain in self._replaced:
            setattr(owner, name, plain)

    def _unseen(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            before, self.paused = self.paused, True
            try:
                return plain(*args, **kwargs)
            finally:
                self.paused = before

        return call

    def storage(self, tensor: Tensor) -> Storage | None:
        """What is known of the memory of a plain tensor; a new one is noted."""
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key not in self.live:
            module, again = self.where.now(self.phase == "backward")
            phase = "recompute" if again else self.phase
            found = Storage(self.rounded(memory.nbytes()), phase, module, self.micro)
            self.live[key] = found
            self.changes.append((len(self.operators), found, found.size))
            weakref.finalize(memory, self._freed, key).atexit = False
        return self.live[key]

    def mark(self, tensors: Any, kind: str) -> None:
        """Say of which kind the memory of these tensors is."""
        for tensor in tensors:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if isinstance(local, Tensor) and (found := self.storage(local)) is not None:
                found.kind = kind

    def keep(self) -> None:
        """Forward is over: what it made and still lives is kept for backward."""
        for storage in self.live.values():
            if storage.phase in ("forward", "loss") and storage.micro == self.micro:
                storage.kept = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is not FakeTensor and is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # it is seen when it has become operators on the parts
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        if self.paused or name.startswith(_SILENT):
            return result
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        inputs = [self.storage(t) for t in given]
        outputs = [self.storage(t) for t in made]
        known = {id(s) for s in inputs}
        new = [s for s in outputs if id(s) not in known]
        self._derive(func, args, kwargs, inputs, new)
        kind = kind_of(func)
        module, again = self.where.now(self.phase == "backward")
        free = name in _FREE or func.namespace in SPACES or (not new and not func._schema.is_mutable)
        operator = Operator(
            "recompute" if again else self.phase,
            self.micro,
            module,
            name,
            0 if free else _flops(func, args, kwargs, result),
            0 if free else sum(t.numel() * t.element_size() for t in (*given, *made)),
            str((made or given)[0].dtype).removeprefix("torch.") if made or given else "",
        )
        if kind is not None:
            group = group_of((*args, *kwargs.values()))
            sent = moved((*args, *kwargs.values()), result)
            axis = self.axes.get(group, "an unknown group")
            operator = attrs.evolve(operator, kind=kind, axis=axis, sent=sent)
            for storage in (*inputs, *outputs):
                if storage is not None:
                    storage.travels = True
        self.operators.append(operator)
        return result

    def _derive(self, func: Any, args: Any, kwargs: Any, inputs: list[Any], new: list[Any]) -> None:
        """Note what is made of parameters alone: by an operator that returns it, or that writes to it."""
        written: list[int] = []
        if func._schema.is_mutable:
            named = {**dict(zip([a.name for a in func._schema.arguments], args, strict=False)), **kwargs}
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    leaves = tree_leaves(named.get(argument.name))
                    written += [id(self.storage(t)) for t in leaves if isinstance(t, Tensor)]
        sources = [s for s in inputs if id(s) not in written]
        if sources and all(s.copies or s.kind == "parameters" for s in sources):
            for storage in (*new, *(s for s in inputs if id(s) in written)):
                storage.copies = True

    def _freed(self, key: int) -> None:
        storage = self.live.pop(key, None)
        if storage is not None:
            self.changes.append((len(self.operators), storage, -storage.size))

    def _resized(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(memory: Any, size: int) -> Any:
            result = plain(memory, size)
            storage = self.live.get(memory._cdata)
            if storage is not None and (more := self.rounded(memory.nbytes()) - storage.size):
                storage.size += more
                storage.resized = True
                self.changes.append((len(self.operators), storage, more))
            return result

        return resize_


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    packet = _LIKE.get(func._overloadpacket, func._overloadpacket)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    if packet.__name__.startswith("_scaled_dot_product"):
        args = _heads_of_queries(args)
    return int(formula(*args, **kwargs, out_val=result))


def _heads_of_queries(args: Any) -> list[Any]:
    """Shapes, in which keys and values are repeated for all heads that share them: torch 2.11's formula wants it so."""
    heads = max(a.shape[1] for a in args if isinstance(a, Tensor) and a.dim() == 4)
    shapes = [tuple(a.shape) if isinstance(a, Tensor) else a for a in args]
    return [(s[0], heads, *s[2:]) if isinstance(s, tuple) and len(s) == 4 else s for s in shapes]
