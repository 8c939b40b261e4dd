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
from plait.contract.weight_part import WeightPart, parts_by_fqn
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
    path: str | os.PathLike[str],
    parameters: Mapping[str, Sequence[int]],
    ties: Mapping[str, str] | None = None,
    parts: Mapping[str, WeightPart] | None = None,
) -> None:
    """Raises PlaitError unless `path` holds exactly `parameters` (FQN -> shape), undamaged. Imports no torch.

    Reads every byte of a folder with a SHA256SUMS, so one process calls it before the ranks start. The tensors of a
    Plait checkpoint are not read: `read_weights` compares their digests.
    ties: further FQN of a tied parameter -> its first, as `state.tied_names` gives them; a file may have either or
        both.
    parts: what the model's `weight_parts()` returns; without, files have the parameters' own names.
    """
    path = Path(path)
    _check_names(path, parameters, ties or {}, parts or {})
    if not (path / MANIFEST).is_file():
        check_sums(path)
    elif problem := Store.quick_problem(path):
        raise PlaitError(f"the weights of the checkpoint {path} cannot be used: {problem}")


def _check_names(
    path: Path, parameters: Mapping[str, Sequence[int]], ties: Mapping[str, str], parts: Mapping[str, WeightPart]
) -> None:
    if (path / MANIFEST).is_file():
        Store.check_model(Store.read(path), parameters)
    else:
        _parts_in(open_files(path), parameters, ties, parts)


def read_weights(
    path: str | os.PathLike[str],
    state: Mapping[str, "Tensor"],
    ties: Mapping[str, str] | None = None,
    whole: Mapping[str, Sequence[int]] | None = None,
    parts: Mapping[str, WeightPart] | None = None,
) -> None:
    """Fill `state` (FQN -> tensor or DTensor) in place, cast to its dtypes. Called by all ranks.

    One tensor of the files at a time; of a DTensor a rank reads its own part. `ties`, `parts` and errors as for
    `check_weights`, except that a SHA256SUMS is not compared again. whole: FQN -> shape of the model, if `state` has
    only a part of it.
    """
    path = Path(path)
    parameters = whole or {fqn: tuple(tensor.shape) for fqn, tensor in state.items()}
    _check_names(path, parameters, ties or {}, parts or {})
    if (path / MANIFEST).is_file():
        from plait.checkpoint.load import load

        load(path, {f"model.{fqn}": tensor for fqn, tensor in state.items()})
        return
    files = open_files(path)
    found = _parts_in(files, parameters, ties or {}, parts or {})
    by_file: dict[Path, dict[str, WeightPart]] = {}
    for fqn in state:
        for name, part in found[fqn].items():
            by_file.setdefault(files.where[name], {})[name] = part
    for file, wanted in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for name, part in wanted.items():
                _fill(state[part.fqn], tensors, name, part)


def _parts_in(
    files: Files, parameters: Mapping[str, Sequence[int]], ties: Mapping[str, str], parts: Mapping[str, WeightPart]
) -> dict[str, dict[str, WeightPart]]:
    """FQN -> the tensors of the files that make up the parameter. Raises PlaitError if they are not the model's."""
    own = parts_by_fqn(parameters, parts)
    found = dict(files.shapes)
    for alias, first in ties.items():
        theirs = own.pop(alias, None) or {alias: WeightPart.whole(alias, parameters[first])}
        if theirs.keys() <= found.keys():
            shapes = {name: found.pop(name) for name in theirs}
            if not own[first].keys() <= found.keys():
                found |= shapes
                own[first] = {name: attrs.evolve(part, fqn=first) for name, part in theirs.items()}
    wanted = {name: part.shape for fqn in parameters for name, part in own[fqn].items()}
    compare(found, wanted, f"the weights in {files.path} are of another model")
    return own


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


def _fill(tensor: "Tensor", source: Any, name: str, part: WeightPart) -> None:
    """What `tensor` holds of the part on this rank."""
    import torch
    from torch.distributed.tensor import DTensor

    from plait.parallel.initialize import held_indices

    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if tensor.dim() == 0:
            local.copy_(source.get_tensor(name))
            return
        here, there = [], []  # per dim of the parameter: places in `local`, and in the part
        for dim, (start, size) in enumerate(zip(part.start, part.size, strict=True)):
            held = held_indices(tensor, dim) - start
            inside = (held >= 0) & (held < size)
            here.append(inside.nonzero().flatten())
            there.append(held[inside])
        if any(not len(places) for places in here):
            return
        read = source.get_slice(name)[tuple(_span(there[dim]) for dim in part.dims)]
        piece = part.as_in_parameter(read)
        for dim, places in enumerate(there):
            if len(places) != piece.shape[dim]:
                piece = piece.index_select(dim, places - places.min())
        if all(_span(places).stop - _span(places).start == len(places) for places in here):
            local[tuple(map(_span, here))] = piece.to(local.device, local.dtype)
        else:
            local[torch.meshgrid(*here, indexing="ij")] = piece.to(local.device, local.dtype)


def _span(places: "Tensor") -> slice:
    """From the first of the places, which ascend, to the last."""
    return slice(int(places[0]), int(places[-1]) + 1)
