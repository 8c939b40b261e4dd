"""Weights out of a run, as safetensors files that other tools read."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from plait.checkpoint.files import put_in_place, sync, write_synced
from plait.checkpoint.weights import INDEX
from plait.errors import PlaitError


def export(
    state: Mapping[str, Tensor],
    folder: str | os.PathLike[str],
    is_writer: bool,
    max_shard_bytes: float = 5e9,
) -> None:
    """Write `state` (FQN -> tensor or DTensor) to `folder`: all ranks gather, the one with `is_writer` writes.

    One file `model.safetensors`, or where that would pass `max_shard_bytes`, several and an index, named as Hugging
    Face does. Parameters are gathered one by one: the writer holds one file's in memory, the others one. The folder
    appears whole or not at all, and takes the place of one of that name.
    Raises PlaitError, on the writer, where it cannot be written.
    """
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".tmp")
    files = _split(state, max_shard_bytes)
    failure: Exception | None = None
    if is_writer:
        shutil.rmtree(partial, ignore_errors=True)
    for name, fqns in files.items():
        held: dict[str, Tensor] = {}
        for fqn in fqns:
            whole = _whole(state[fqn])
            if is_writer and failure is None:
                held[fqn] = whole.to("cpu").contiguous()
        try:
            if held:
                _write(held, partial / name)
        except (OSError, SafetensorError) as error:
            failure = error  # the other ranks gather on, so this one must too
    if not is_writer:
        return
    try:
        if failure is not None:
            raise failure
        if len(files) > 1:
            total = sum(_bytes(tensor) for tensor in state.values())
            where = {fqn: name for name, fqns in files.items() for fqn in fqns}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            write_synced(partial / INDEX, json.dumps(index, indent=2) + "\n")
        put_in_place(partial, folder)
    except (OSError, SafetensorError) as error:
        raise PlaitError(f"the weights could not be exported to {folder}: {error}") from error


def _split(state: Mapping[str, Tensor], max_shard_bytes: float) -> dict[str, list[str]]:
    """File name -> FQNs, in order, each file up to `max_shard_bytes` (a larger parameter has one of its own)."""
    shards: list[list[str]] = []
    room = 0.0
    for fqn, tensor in state.items():
        if not shards or _bytes(tensor) > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(fqn)
        room -= _bytes(tensor)
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    on_mesh = tensor.to(tensor.device_mesh.device_type)  # parameters may rest on the CPU of a mesh of GPUs
    return cast(DTensor, on_mesh).full_tensor()


def _write(tensors: dict[str, Tensor], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"format": "pt"})
    sync(file)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
