"""Writes a run's weights as safetensors files that other tools read."""

import functools
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plait.checkpoint.merged import merged
from plait.checkpoint.passed_on import PassedOn, passed_on
from plait.checkpoint.weights import Weights, of, write
from plait.contract.errors import PlaitError
from plait.contract.weight_part import WeightPart, parts_by_fqn, weight_parts
from plait.parallel.agreement import on_all_ranks
from plait.parallel.sharding import whole_tensor
from plait.parallel.state import weights

if TYPE_CHECKING:
    from plait.data.tokenizer_files import Used
    from plait.parallel.applied import Applied


def export_run(
    applied: "Applied", folder: Path, known: Collection[str], tokenizer: "Callable[[], Used | None]" = lambda: None
) -> None:
    """Write all weights, with what the model puts beside them, or what a strategy exports instead. Called by all ranks.

    known: as for `export`. tokenizer: returns the one of the data, which lies beside the weights; called on rank 0.
    """
    own = weights(applied.checkpoint()[0])
    made, model = applied.export(own), applied.parts[0]
    beside, parts = made.files, dict[str, WeightPart]()
    if beside is None:
        beside, parts = getattr(model, "export_files", dict)(), dict(weight_parts(model))
    used = tokenizer() if dist.get_rank() == 0 else None
    if used is not None:
        beside = used.beside(beside)
    known = known if made.tensors.keys() == own.keys() else ()
    writes = dist.get_rank() == 0
    others = None
    if made.files is None and writes and hasattr(model, "passed_on"):
        others = passed_on(model)
    export(made.tensors, folder, writes, known=known, beside=beside, stem=made.stem, parts=parts, others=others)


def export(
    state: Mapping[str, Tensor],
    folder: str | os.PathLike[str],
    is_writer: bool,
    max_shard_bytes: float = 5e9,
    known: Collection[str] = (),
    beside: Mapping[str, str] | None = None,
    stem: str = "model",
    parts: Mapping[str, WeightPart] | None = None,
    others: "PassedOn | None" = None,
) -> None:
    """Write `state` (FQN -> tensor or DTensor) to `folder`: all ranks gather, the one with `is_writer` writes.

    Ranks may have other entries than others: the writer gets those that it lacks. known: FQNs of which some rank must
    have one, in their order in the files; if none has, PlaitError is raised on all ranks, and nothing is written.

    beside: name -> text of further files of the folder, such as config.json; used on the writer.
    parts: name in the files -> part; entries of which it has none keep their names.
    others: further tensors that the files get; used on the writer.

    Writes one file `<stem>.safetensors`, or several with an index if that would exceed `max_shard_bytes`, named as
    Hugging Face does, and a SHA256SUMS. Parameters are gathered one by one: the writer holds one file's and one more in
    memory, the others one. The folder appears complete or not at all, and replaces one of the same name. Raises
    DiskError, on the writer, if it cannot be written.
    """
    together = _Together(state, is_writer, known)
    entries = together.entries
    by_fqn = parts_by_fqn({fqn: entry.shape for fqn, entry in entries.items()}, parts or {})
    named = {name: part for fqn in entries for name, part in by_fqn[fqn].items()}
    bytes_of = {name: math.prod(part.size) * entries[part.fqn].dtype.itemsize for name, part in named.items()}
    bytes_of |= others.bytes_of() if others else {}
    to_gather, gathered, whole = deque(named), "", None

    def gather(name: str) -> Any:
        """The next tensor of the files, on the writer; None on other ranks."""
        nonlocal gathered, whole
        if name not in named:
            return others and others.read(name)
        to_gather.remove(name)
        part = named[name]
        if part.fqn != gathered:
            whole = None  # the one before, before another is gathered
            gathered, whole = part.fqn, together.at_writer(part.fqn)
        if whole is None:
            return None
        own = part.of(whole)
        shared = len(by_fqn[part.fqn]) > 1  # safetensors refuses tensors that share memory
        return own.clone(memory_format=torch.contiguous_format) if shared else own.contiguous()

    failure: Exception | None = None
    if is_writer:
        try:
            write(folder, bytes_of, gather, beside, stem=stem, max_shard_bytes=max_shard_bytes, replace=True)
        except (OSError, PlaitError, SafetensorError) as error:
            failure = error
    while to_gather:
        gather(to_gather[0])  # the other ranks continue to gather after a failure, so the writer must too
    if failure is not None:
        raise failure


def export_weights(
    model: nn.Module,
    source: Weights,
    folder: str | os.PathLike[str],
    max_shard_bytes: float = 5e9,
    progress: Callable[[str, int, int], None] = lambda file, done, total: None,
) -> None:
    """Write the weights in `source`, such as a checkpoint's, to the new folder `folder` as a run's export has them.

    model: of these weights, with a method `export_files()`; it may be on meta. progress: as for `weights.write`. In one
    process, which holds one file's tensors and one more, and reads each once. Raises PlaitError for weights that are
    not the model's.
    """
    shapes = {fqn: tuple(tensor.shape) for fqn, tensor in of(model).items()}
    for name, shape in shapes.items():
        if source.shapes.get(name) != shape:
            has = f"{name!r} of shape {source.shapes[name]}" if name in source.shapes else f"no {name!r}"
            raise PlaitError(f"{source.what} has {has}, and the model one of {shape}").at("model", name, fits=shape)
    if other := next((name for name in source.shapes if name not in shapes), None):
        raise PlaitError(
            f"{source.what} has {other!r}, which the model has no place for; what a strategy added, such as adapters, "
            "is exported by its own run alone"
        ).at("model", other)
    by_fqn, others = parts_by_fqn(shapes, weight_parts(model)), passed_on(model)
    whole = functools.lru_cache(maxsize=1)(source.read)  # the parts of a stack follow each other
    named = {name: part for fqn in shapes for name, part in by_fqn[fqn].items()}
    sizes = {name: math.prod(part.size) * source.dtypes[part.fqn].itemsize for name, part in named.items()}

    def tensor(name: str) -> Tensor:
        if name not in named:
            assert others is not None
            return others.read(name)
        return named[name].of(whole(named[name].fqn)).clone(memory_format=torch.contiguous_format)

    passed = others.bytes_of() if others else {}
    files: Any = model
    beside = {**files.export_files(), **source.beside}
    write(folder, sizes | passed, tensor, beside, max_shard_bytes=max_shard_bytes, progress=progress)


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):  # parameters may be on the CPU while their mesh is of GPUs
        tensor = cast(DTensor, tensor.to(tensor.device_mesh.device_type))
    return whole_tensor(tensor)


@attrs.frozen
class _Entry:
    """A tensor of the export: a rank that has it, its shape and its dtype."""

    rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Together:
    """What all ranks export, in order: `entries`, FQN -> entry. Called by all ranks."""

    def __init__(self, state: Mapping[str, Tensor], is_writer: bool, known: Collection[str]) -> None:
        group = dist.group.WORLD if dist.is_initialized() else None
        self._state, self._rank = state, dist.get_rank() if group else 0

        def all_ranks(work: Callable[[], Any]) -> list[Any]:
            return on_all_ranks(work, group)

        self._writer = next((rank for rank, writes in enumerate(all_ranks(lambda: is_writer)) if writes), -1)
        own = {fqn: _Entry(self._rank, tuple(t.shape), t.dtype) for fqn, t in state.items()}
        self.entries, self._alike = merged(own, all_ranks, known)

    def at_writer(self, fqn: str) -> Tensor | None:
        """The whole tensor on the CPU of the writer; None on other ranks."""
        entry, writes = self.entries[fqn], self._rank == self._writer
        whole = _whole(self._state[fqn]) if fqn in self._state else None
        if self._alike or entry.rank == self._writer:
            return whole.to("cpu").contiguous() if whole is not None and writes else None
        if self._rank == entry.rank and whole is not None:
            dist.send(_raw(whole.to("cpu").contiguous()), dst=self._writer)
        if not writes:
            return None
        got = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        dist.recv(_raw(got), src=entry.rank)
        return got


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
