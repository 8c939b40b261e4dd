"""Reads weights alone, to start a run: from a Plait checkpoint, a .safetensors file, or a folder of such files."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from safetensors import SafetensorError, safe_open

from plait.checkpoint.store import MANIFEST, Store, compare
from plait.checkpoint.sums import check_sums
from plait.contract.errors import PlaitError
from plait.system.disk import check_regular

if TYPE_CHECKING:  # the parent checks weights without torch
    from torch import Tensor

INDEX = "model.safetensors.index.json"


@attrs.frozen
class Files:
    """Several safetensors files as one: name -> file, name -> shape."""

    path: Path
    where: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]


def check_weights(
    path: str | os.PathLike[str], parameters: Mapping[str, Sequence[int]], ties: Mapping[str, str] | None = None
) -> None:
    """Raises PlaitError unless `path` holds exactly `parameters` (FQN -> shape), undamaged. Imports no torch.

    Reads every byte of a folder with a SHA256SUMS, so one process calls it before the ranks start. The tensors of a
    Plait checkpoint are not read: `read_weights` compares their digests.
    ties: further FQN of a tied parameter -> its first, as `state.tied_names` gives them; a file may have either or
        both.
    """
    path = Path(path)
    _check_names(path, parameters, ties or {})
    if not (path / MANIFEST).is_file():
        check_sums(path)
    elif problem := Store.look(path):
        raise PlaitError(f"the weights of the checkpoint {path} cannot be used: {problem}")


def _check_names(path: Path, parameters: Mapping[str, Sequence[int]], ties: Mapping[str, str]) -> None:
    if (path / MANIFEST).is_file():
        Store.check_model(Store.read(path), parameters)
    else:
        _named(open_files(path), parameters, ties)


def read_weights(
    path: str | os.PathLike[str],
    state: Mapping[str, "Tensor"],
    ties: Mapping[str, str] | None = None,
    whole: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Fill `state` (FQN -> tensor or DTensor) in place, cast to its dtypes. Called by all ranks.

    One parameter at a time; of a DTensor a rank reads its own part. `ties` and errors as for `check_weights`, except
    that a SHA256SUMS is not compared again. whole: FQN -> shape of the model, if `state` has only a part of it.
    """
    path = Path(path)
    parameters = whole or {fqn: tuple(tensor.shape) for fqn, tensor in state.items()}
    _check_names(path, parameters, ties or {})
    if (path / MANIFEST).is_file():
        from plait.checkpoint.load import load

        load(path, {f"model.{fqn}": tensor for fqn, tensor in state.items()})
        return
    files = open_files(path)
    names = _named(files, parameters, ties or {})
    by_file: dict[Path, list[str]] = {}
    for fqn in state:
        by_file.setdefault(files.where[names[fqn]], []).append(fqn)
    for file, fqns in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for fqn in fqns:
                _fill(state[fqn], tensors, names[fqn])


def _named(files: Files, parameters: Mapping[str, Sequence[int]], ties: Mapping[str, str]) -> dict[str, str]:
    """FQN -> its name in the files."""
    names = {fqn: fqn for fqn in parameters}
    found = dict(files.shapes)
    for alias, first in ties.items():
        if alias in found:
            shape = found.pop(alias)
            if first not in found:
                found[first], names[first] = shape, alias
    compare(found, parameters, f"the weights in {files.path} are of another model")
    return names


def open_files(path: Path) -> Files:
    files = [path]
    if path.is_dir():
        files = _indexed(path) or sorted(path.glob("*.safetensors"))
        if not files:
            raise PlaitError(f"the folder {path} holds neither a checkpoint of Plait nor .safetensors files")
    elif not os.path.lexists(path):
        raise PlaitError(f"there are no weights at {path}: no such file or folder")
    where: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            check_regular(file)
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    if name in where:
                        raise PlaitError(f"{name!r} is in both {where[name]} and {file}")
                    where[name], shapes[name] = file, tuple(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise PlaitError(f"{file} is not a readable safetensors file: {error}") from None
    return Files(path, where, shapes)


def _indexed(folder: Path) -> list[Path]:
    """The files that the folder's index names, if it has one."""
    try:
        check_regular(folder / INDEX)
        index = json.loads((folder / INDEX).read_bytes())
        names = set(index["weight_map"].values())
        if outside := [name for name in names if Path(name).name != name]:
            raise PlaitError(f"the index {folder / INDEX} names {outside[0]!r}, which is not in its folder")
        return sorted(folder / name for name in names)
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise PlaitError(f"the index {folder / INDEX} cannot be read: {error}") from None


def _fill(tensor: "Tensor", source: Any, name: str) -> None:
    import torch
    from torch.distributed.tensor import DTensor

    from plait.parallel.initialize import held_indices

    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel() == 0:
            return
        if tensor.dim() == 0:
            local.copy_(source.get_tensor(name))
            return
        held = [held_indices(tensor, dim) for dim in range(tensor.dim())]
        part = source.get_slice(name)[tuple(slice(int(h.min()), int(h.max()) + 1) for h in held)]
        for dim, indices in enumerate(held):
            if len(indices) != part.shape[dim] or not bool((indices.diff() == 1).all()):
                part = part.index_select(dim, indices - indices.min())
        local.copy_(part)
