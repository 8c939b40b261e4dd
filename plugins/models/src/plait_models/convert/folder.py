"""Converts files of weights one tensor at a time."""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from plait import PlaitError, misfit
from plait.host import export_weights, weights
from plait_models.convert.config import CONFIG, check_config, config_of
from plait_models.convert.plan import ConvertedTensor, make_ours, make_theirs, ours_from, table_of, theirs_from


def convert(
    model: nn.Module,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    max_shard_bytes: float = 5e9,
    progress: Callable[[str, int, int], None] = lambda file, done, total: None,
) -> Path:
    """Write the weights in `source` to the new folder `target` in the other form, and return it.

    model:    the model of the weights; it may be on meta, and has a method `hugging_face()`, or `export_files()` if its
        names are those of Hugging Face's files.
    source:   a .safetensors file or a folder of them, or (to "hf") a Plait checkpoint.
    to:       "hf": files and config.json for Hugging Face's libraries. "plait": files for `checkpoint.init_from`.
    progress: called after each tensor with its file, the bytes done and the bytes in total.

    Holds one tensor, or one stack of experts, besides the file that is being written. The folder appears complete
    or not at all. Raises PlaitError for what does not fit, already exists, or cannot be read or written.
    """
    source, target = Path(source), Path(target)
    if to not in ("hf", "plait"):
        raise misfit("to", to, "'hf' or 'plait'")
    weights.check_new(target)
    if not hasattr(model, "hugging_face") and hasattr(model, "export_files"):
        if to == "plait":
            raise PlaitError(
                f"{type(model).__name__} has the names of Hugging Face's files: it starts from {source} as it is, with "
                f"model.path={source}"
            )
        with weights.read(source) as tensors:
            export_weights(model, tensors, target, max_shard_bytes, progress)
        return target
    table = table_of(model)
    with weights.read(source) as tensors:
        beside = dict(tensors.beside)
        if to == "plait":
            check_config(table, source)
            pieces, make = ours_from(model, tensors), make_ours
        else:
            pieces, make = theirs_from(model, tensors), make_theirs
            beside[CONFIG] = json.dumps(config_of(table, _most(pieces)), indent=2) + "\n"
        by_name = {piece.name: piece for piece in pieces}

        def tensor(name: str) -> Tensor:
            return make(by_name[name], tensors)

        sizes = {piece.name: piece.bytes for piece in pieces}
        weights.write(target, sizes, tensor, beside, max_shard_bytes=max_shard_bytes, progress=progress)
    return target


def _most(pieces: list[ConvertedTensor]) -> torch.dtype:
    """The dtype of most bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for piece in pieces:
        sizes[piece.dtype] += piece.bytes
    return sizes.most_common(1)[0][0] if sizes else torch.float32
