"""Records what one rank does in a step: its operators, its collectives, and the memory in use."""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from plait_plan.torch_internals import (
    FakeTensor,
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
    local_part,
    schema,
    shape_learners,
    storage_key,
)
from plait_plan.tracing.shards import parts_alone
from plait_plan.tracing.traffic import SPACES, group_of, kind_of, moved, tensors_in
from plait_plan.tracing.where import Where

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
# Kernels of CPUs that torch has no formula for -> those of GPUs, which compute the same.
_LIKE = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
_SILENT = ("prim::device", "profiler::")  # questions about a tensor, and remarks for a profiler
BOUNDARY = "plait::boundary"  # the name of a mark
_FREE = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")

_FUSES = frozenset(f"aten::{name}" for name in (  # beside what torch tags as pointwise
    "_to_copy", "clone", "copy", "copy_", "cat", "stack", "sum", "mean", "amax", "amin", "var_mean", "cumsum",
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "nll_loss_forward",
    "nll_loss_backward", "native_layer_norm", "native_layer_norm_backward",
    "_fused_rms_norm", "_fused_rms_norm_backward", "slice_backward", "select_backward", "zeros_like", "fill_",
    "gather", "scatter", "scatter_add", "arange", "full", "full_like", "scalar_tensor", "index", "constant_pad_nd",
    "slice_scatter", "select_scatter",
))  # fmt: skip


@attrs.define(eq=False, slots=True)
class Storage:
    """Memory of one or several tensors.

    copies: whether it was computed from parameters alone. travels: whether a collective reads or writes it.
    resized: whether its size changed outside of operators, as FSDP2 does with gathered parameters.
    stream: number of the stream for which it was allocated; 0 is the default one.
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
    stream: int = 0


@attrs.frozen(slots=True)
class Operator:
    """One call.

    sent: the bytes that a collective moves; 0 for other calls. batch: the part of `bytes` in tensors whose number of
    elements is a multiple of the recorder's unit. opens: whether it is the first to read what an all-gather received;
    of functional ones `wait_tensor` is.
    """

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
    batch: int = 0
    opens: bool = False


@attrs.frozen(slots=True)
class Touched:
    """The bytes that one operator reads and writes, by storage; empty if it is free.

    fuses: whether inductor puts it into one kernel with its neighbours.
    """

    reads: dict[Storage, int]
    writes: dict[Storage, int]
    fuses: bool

    @classmethod
    def by(cls, func: Any, operator: Operator, given: Iterable[Any], made: Iterable[Any]) -> "Touched":
        if not operator.bytes and func.namespace not in SPACES:
            return cls({}, {}, False)
        reads = {s: min(t.numel() * t.element_size(), s.size) for t, s in given}
        writes = {s: min(t.numel() * t.element_size(), s.size) for t, s in made}
        return cls(reads, writes, torch.Tag.pointwise in func.tags or operator.name in _FUSES)


class Recorder(TorchDispatchMode):
    """`with Recorder(where, axes, rounded) as recorder:` around all that makes tensors.

    axes: name of a process group -> mesh axis. rounded: the size that an allocator uses for a size. unit: see
    `Operator.batch`; 0: there is none.
    phase, micro: what runs, and for which micro-batch; set by the code that drives the step.
    operators: in order. changes: (number of the operator after which it is so, storage, bytes more or less).
    past: the changes that `clear` dropped. touched: what each operator reads and writes.
    """

    def __init__(
        self, where: Where, axes: Mapping[str, str], rounded: Callable[[int], int] = int, unit: int = 0
    ) -> None:
        super().__init__()
        self.where, self.axes, self.rounded, self.unit = where, axes, rounded, unit
        self.phase, self.micro = "start", 0
        self.paused = False
        self.storages: dict[int, Storage] = {}
        self.past: list[tuple[int, Storage, int]] = []
        self.changes: list[tuple[int, Storage, int]] = []
        self._streams: list[Any] = [torch.cpu.current_stream()]
        self._received: set[int] = set()  # ids of the storages of all-gathers that nobody has read yet
        self.clear()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # a compiler that traces meanwhile is not part of the step; the graph that it makes is

    def clear(self) -> None:
        """Drop the recorded calls; keep the memory that is in use."""
        self.operators: list[Operator] = []
        self.touched: list[Touched] = []
        self.past += self.changes
        self.changes = []
        self.before = list(self.storages.values())
        self.sizes_before = {id(storage): storage.size for storage in self.before}

    def __enter__(self) -> "Recorder":
        """Until the end, functions of torch are replaced to see two things that a dispatch mode does not see: storages
        that change size, and operators that DTensor calls only to learn the shape of their result."""
        self._replaced: list[tuple[Any, str, Any]] = [(torch.UntypedStorage, "resize_", torch.UntypedStorage.resize_)]
        torch.UntypedStorage.resize_ = self._resized(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
        for propagator, name in shape_learners():
            plain = getattr(propagator, name)
            self._replaced.append((propagator, name, plain))
            setattr(propagator, name, self._unseen(plain))
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

    def storage(self, tensor: Tensor) -> Storage:
        """The `Storage` of a plain tensor; a new one is noted."""
        memory = tensor.untyped_storage()
        key = storage_key(memory)
        if key not in self.storages:
            module, again = self.where.now(self.phase == "backward")
            phase = "recompute" if again else self.phase
            found = Storage(self.rounded(memory.nbytes()), phase, module, self.micro, stream=self._stream())
            self.storages[key] = found
            self.changes.append((len(self.operators), found, found.size))
            weakref.finalize(memory, self._freed, key).atexit = False
        return self.storages[key]

    def _stream(self) -> int:
        """The number of the current stream. On CPUs torch's streams exist and do nothing, so code that asks for a
        stream of its own asks here too."""
        current = torch.cpu.current_stream()
        for number, stream in enumerate(self._streams):
            if stream is current:
                return number
        self._streams.append(current)
        return len(self._streams) - 1

    def mark(self, tensors: Any, kind: str) -> None:
        """Set the kind of the memory of these tensors."""
        for tensor in tensors:
            local = local_part(tensor)
            if isinstance(local, Tensor) and (found := self.storage(local)) is not None:
                found.kind = kind

    def keep(self) -> None:
        """Call it after forward: memory that forward allocated and that is still in use is kept for backward."""
        for storage in self.storages.values():
            if storage.phase in ("forward", "loss") and storage.micro == self.micro:
                storage.kept = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # the most frequent call by far
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        kwargs = kwargs or {}
        if any(t is not FakeTensor and is_traceable_wrapper_subclass_type(t) for t in types):
            if (local := parts_alone(func, args)) is None:
                return NotImplemented  # it is seen when it has become operators on the parts
            args = local
        result = func(*args, **kwargs)
        name = schema(func).name
        if self.paused or name.startswith(_SILENT):
            return result
        given, made = tensors_in((*args, *kwargs.values())), tensors_in((result,))
        inputs = [self.storage(t) for t in given]
        outputs = [self.storage(t) for t in made]
        known = {id(s) for s in inputs}
        new = [s for s in outputs if id(s) not in known]
        self._derive(func, args, kwargs, inputs, new)
        kind = kind_of(func)
        module, again = self.where.now(self.phase == "backward")
        free = name in _FREE or func.namespace in SPACES or (not new and not schema(func).is_mutable)
        operator = Operator(
            "recompute" if again else self.phase,
            self.micro,
            module,
            name,
            0 if free else _flops(func, args, kwargs, result),
            0 if free else sum(t.numel() * t.element_size() for t in (*given, *made)),
            str((made or given)[0].dtype).removeprefix("torch.") if made or given else "",
            batch=self._of_batch((*given, *made)) if self.unit and not free else 0,
            opens=not free and self._opens(inputs),
        )
        if kind is not None:
            group = group_of((*args, *kwargs.values()))
            sent = moved((*args, *kwargs.values()), result)
            axis = self.axes.get(group, "an unknown group")
            operator = attrs.evolve(operator, kind=kind, axis=axis, sent=sent)
            for storage in (*inputs, *outputs):
                if storage is not None:
                    storage.travels = True
            if kind == "all_gather" and func.namespace == "c10d":
                self._received.add(id(max((*inputs, *outputs), key=lambda storage: storage.size)))
        self.operators.append(operator)
        self.touched.append(
            Touched.by(func, operator, zip(given, inputs, strict=True), zip(made, outputs, strict=True))
        )
        return result

    def boundary(self) -> None:
        """Mark this moment by calls that do nothing; the level of the second is exactly what is in use now."""
        for _ in range(2):
            self.operators.append(Operator(self.phase, self.micro, "", BOUNDARY, 0, 0, ""))
            self.touched.append(Touched({}, {}, False))

    def _opens(self, inputs: list[Any]) -> bool:
        new = self._received.intersection(map(id, inputs))
        self._received -= new
        return bool(new)

    def _of_batch(self, tensors: Iterable[Tensor]) -> int:
        return sum(t.numel() * t.element_size() for t in tensors if t.numel() % self.unit == 0)

    def _derive(self, func: Any, args: Any, kwargs: Any, inputs: list[Any], new: list[Any]) -> None:
        """Note tensors that are computed from parameters alone, as a result or in place."""
        written: list[int] = []
        if schema(func).is_mutable:
            named = {**dict(zip([a.name for a in schema(func).arguments], args, strict=False)), **kwargs}
            for argument in schema(func).arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written += [id(self.storage(t)) for t in tensors_in((named.get(argument.name),))]
        sources = [s for s in inputs if id(s) not in written]
        if sources and all(s.copies or s.kind == "parameters" for s in sources):
            for storage in (*new, *(s for s in inputs if id(s) in written)):
                storage.copies = True

    def _freed(self, key: int) -> None:
        storage = self.storages.pop(key, None)
        self._received.discard(id(storage))
        if storage is not None:
            self.changes.append((len(self.operators), storage, -storage.size))

    def _resized(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(memory: Any, size: int) -> Any:
            result = plain(memory, size)
            storage = self.storages.get(storage_key(memory))
            if storage is not None and (more := self.rounded(memory.nbytes()) - storage.size):
                storage.size += more
                storage.resized = True
                self.changes.append((len(self.operators), storage, more))
            return result

        return resize_


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    packet = _LIKE.get(func.overloadpacket, func.overloadpacket)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    if packet.__name__.startswith("_scaled_dot_product"):
        args = _heads_of_queries(args)
    return int(formula(*args, **kwargs, out_val=result))


def _heads_of_queries(args: Any) -> list[Any]:
    """The shapes with keys and values repeated for all heads that share them, as torch 2.11's formula needs them."""
    heads = max(a.shape[1] for a in args if isinstance(a, Tensor) and a.dim() == 4)
    shapes = [tuple(a.shape) if isinstance(a, Tensor) else a for a in args]
    return [(s[0], heads, *s[2:]) if isinstance(s, tuple) and len(s) == 4 else s for s in shapes]
