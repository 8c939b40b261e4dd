"""Reads weights alone, to start a run: from a Plait checkpoint, a .safetensors file, or a folder of such files."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from safetensors import safe_open

from plait.checkpoint.best import checkpoint_at
from plait.checkpoint.filled import fill
from plait.checkpoint.saved_twice import check_as_read, check_same
from plait.checkpoint.store import MANIFEST, Store, compare
from plait.checkpoint.sums import check_sums
from plait.checkpoint.weight_files import Files, check_floating, open_files
from plait.contract.errors import PlaitError
from plait.contract.weight_part import WeightPart, parts_by_fqn

if TYPE_CHECKING:  # the parent checks weights without torch
    from torch import Tensor

Parts = Mapping[str, WeightPart]  # name in the files -> part


@attrs.frozen
class FoundWeights:
    """What files have of a model: FQN -> the tensors that make up the parameter. again: (FQN, the tensors that a tied
    parameter has under a second name)."""

    of: dict[str, Parts]
    again: Sequence[tuple[str, Parts]]


def check_weights(
    path: str | os.PathLike[str],
    parameters: Mapping[str, Sequence[int]],
    ties: Mapping[str, str] | None = None,
    parts: Mapping[str, WeightPart] | None = None,
    integers: Collection[str] = (),
) -> None:
    """Raises PlaitError unless `path` holds exactly `parameters` (FQN -> shape), undamaged. Imports no torch.

    Reads every byte of a folder with a SHA256SUMS, so one process calls it before the ranks start. The tensors of a
    Plait checkpoint are not read: `read_weights` compares their digests. A tied parameter that files have under both
    names is read, and torch imported.
    ties: further FQN of a tied parameter -> its first, as `state.tied_names` gives them; a file may have either or
        both.
    parts: what the model's `weight_parts()` returns; without, files have the parameters' own names. A tensor that is a
        part of what the model does not have is left alone.
    integers: FQN of tensors (buffers) that hold no floating-point numbers.
    """
    path = checkpoint_at(path)
    if not (path / MANIFEST).is_file():
        if not isinstance(path, Path):
            raise PlaitError(f"there is no checkpoint at {path}, and weights of another kind must be in a folder").at(
                "checkpoint.init_from", str(path), fits="a checkpoint of Plait, or a folder"
            )
        files = open_files(path)
        places = _found_in(files, parameters, ties or {}, parts or {}, integers)
        check_sums(path)
        for fqn, second in places.again:
            check_same(files, places.of[fqn], second, parameters[fqn])
        return
    Store.check_model(Store.read(path), parameters)
    if problem := Store.quick_problem(path):
        raise PlaitError(f"the weights of the checkpoint {path} cannot be used: {problem}")


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
    path = checkpoint_at(path)
    parameters = whole or {fqn: tuple(tensor.shape) for fqn, tensor in state.items()}
    if (path / MANIFEST).is_file():
        Store.check_model(Store.read(path), parameters)
        from plait.checkpoint.load import load

        load(path, {f"model.{fqn}": tensor for fqn, tensor in state.items()})
        return
    files = open_files(path)
    integers = {fqn for fqn, tensor in state.items() if not tensor.is_floating_point()}
    places = _found_in(files, parameters, ties or {}, parts or {}, integers if whole is None else None)
    by_file: dict[Path, dict[str, WeightPart]] = {}
    for fqn in state:
        for name, part in places.of[fqn].items():
            by_file.setdefault(files.where[name], {})[name] = part
    for file, wanted in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for name, part in wanted.items():
                fill(state[part.fqn], tensors, name, part)
    for fqn, second in places.again:
        if fqn in state:
            check_as_read(files, places.of[fqn], second, state[fqn])


def _found_in(
    files: Files,
    parameters: Mapping[str, Sequence[int]],
    ties: Mapping[str, str],
    parts: Mapping[str, WeightPart],
    integers: Collection[str] | None,
) -> FoundWeights:
    """Raises PlaitError if the tensors of the files are not the model's. integers: None if all of this was checked."""
    own: dict[str, Parts] = dict(parts_by_fqn(parameters, parts))
    held = parameters.keys() | ties.keys()
    rest, again = {n: size for n, size in files.shapes.items() if n not in parts or parts[n].fqn in held}, []
    for alias, first in ties.items():
        theirs = own.pop(alias, None) or {alias: WeightPart.whole(alias, parameters[first])}
        theirs = {name: attrs.evolve(part, fqn=first) for name, part in theirs.items()}
        if not theirs.keys() <= rest.keys():
            continue
        if own[first].keys() <= rest.keys():
            again.append((first, theirs))
        else:
            own[first] = theirs
    wanted = {name: part.shape for fqn in parameters for name, part in own[fqn].items()}
    wanted |= {name: part.shape for _, theirs in again for name, part in theirs.items()}
    if integers is not None:
        whole_numbers = {name for fqn in integers for name in own.get(fqn, ())}
        check_floating(files, wanted.keys() - whole_numbers)
    compare(rest, wanted, f"the weights in {files.path} are of another model")
    return FoundWeights(own, again)
