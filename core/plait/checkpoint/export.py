"""Writes a run's weights as safetensors files that other tools read."""

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
from plait.checkpoint.sums import write_sums
from plait.checkpoint.weights import INDEX
from plait.system.disk import writing


def export(
    state: Mapping[str, Tensor],
    folder: str | os.PathLike[str],
    is_writer: bool,
    max_shard_bytes: float = 5e9,
) -> None:
    """Write `state` (FQN -> tensor or DTensor) to `folder`: all ranks gather, the one with `is_writer` writes.

    Writes one file `model.safetensors`, or several with an index if that would exceed `max_shard_bytes`, named as
    Hugging Face does, and a SHA256SUMS. Parameters are gathered one by one: the writer holds one file's in memory, the
    others one. The folder appears complete or not at all, and replaces one of the same name. Raises DiskError, on the
    writer, if it cannot be written.
    """
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".tmp")
    files = split({fqn: _bytes(tensor) for fqn, tensor in state.items()}, max_shard_bytes)
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
                write_file(held, partial / name)
        except (OSError, SafetensorError) as error:
            failure = error  # the other ranks continue to gather, so this one must too
    if not is_writer:
        return
    with writing(folder, "the exported weights in"):
        try:
            if failure is not None:
                raise failure
            write_index(files, sum(_bytes(tensor) for tensor in state.values()), partial)
            write_sums(partial)
            put_in_place(partial, folder)
        except (OSError, SafetensorError):
            shutil.rmtree(partial, ignore_errors=True)
            raise


def split(sizes: Mapping[str, int], max_shard_bytes: float) -> dict[str, list[str]]:
    """File name -> names, in order, each file up to `max_shard_bytes` (a larger tensor has its own file)."""
    shards: list[list[str]] = []
    room = 0.0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def write_file(tensors: Mapping[str, Tensor], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    mode = file.stat().st_mode  # as the user's other files; safetensors writes files that only the owner may read
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(mode)
    sync(file)


def write_index(files: Mapping[str, list[str]], total_bytes: int, folder: Path) -> None:
    """The index beside the files of `split`, if there are several."""
    if len(files) > 1:
        where = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": where}
        write_synced(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    on_mesh = tensor.to(tensor.device_mesh.device_type)  # parameters may be on the CPU while their mesh is of GPUs
    return cast(DTensor, on_mesh).full_tensor()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
