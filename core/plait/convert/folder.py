"""Converts files of weights one tensor at a time."""

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from plait.checkpoint.export import split, write_file, write_index
from plait.checkpoint.files import sync, write_synced
from plait.checkpoint.store import MANIFEST, Store
from plait.checkpoint.sums import check_sums, write_sums
from plait.checkpoint.weight_files import open_files
from plait.contract.errors import PlaitError, misfit
from plait.convert.config import CONFIG, check_config, config_of
from plait.convert.plan import ConvertedTensor, make_ours, make_theirs, ours_from, table_of, theirs_from
from plait.data.tokenizer_files import files_in, files_of
from plait.system.disk import writing
from plait.system.errors import in_words

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}


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

    model:    the model of the weights; it may be on meta, and has a method `hugging_face()`.
    source:   a .safetensors file or a folder of them, or (to "hf") a Plait checkpoint.
    to:       "hf": files and config.json for Hugging Face's libraries. "plait": files for `checkpoint.init_from`.
    progress: called after each tensor with its file, the bytes done and the bytes in total.

    Holds one tensor, or one stack of experts, besides the file that is being written. The folder appears complete
    or not at all. Raises PlaitError for what does not fit, already exists, or cannot be read or written.
    """
    source, target = Path(source), Path(target)
    if to not in ("hf", "plait"):
        raise misfit("to", to, "'hf' or 'plait'")
    partial = target.with_name(target.name + ".tmp")
    if target.exists() or target.is_symlink():
        raise PlaitError(f"{target} exists already; name a new folder")
    if partial.exists():
        raise PlaitError(f"{partial} is in the way: a conversion that was killed left it there; remove it first")
    table = table_of(model)
    with opened(source) as tensors:
        if to == "plait":
            check_config(table, source)
            pieces, make = ours_from(model, tensors), make_ours
        else:
            pieces, make = theirs_from(model, tensors), make_theirs
        by_name = {piece.name: piece for piece in pieces}
        total, done = sum(piece.bytes for piece in pieces), 0
        files = split({piece.name: piece.bytes for piece in pieces}, max_shard_bytes)
        with writing(target):
            partial.mkdir(parents=True)  # another conversion may have just created it: it is not this one's to remove
        try:
            for file, names in files.items():
                held: dict[str, Tensor] = {}
                for name in names:
                    held[name] = make(by_name[name], tensors)
                    done += by_name[name].bytes
                    progress(file, done, total)
                write_file(held, partial / file)
            write_index(files, total, partial)
            if to == "hf":
                config = config_of(table, _most(pieces))
                write_synced(partial / CONFIG, json.dumps(config, indent=2) + "\n")
            for name, text in _tokenizer_of(source).items():
                write_synced(partial / name, text)
            write_sums(partial)
            _name(partial, target)
        except (OSError, SafetensorError) as error:
            raise PlaitError(f"{source} could not be converted to {target}: {in_words(error, target)}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _tokenizer_of(source: Path) -> dict[str, str]:
    """Name -> text of the tokenizer that belongs to the weights, if it is there."""
    if source.is_dir() and not (source / MANIFEST).is_file():
        return files_in(source, ("generation_config.json",))
    if (source / MANIFEST).is_file():
        with contextlib.suppress(OSError, ValueError, PlaitError):  # it was elsewhere when the run was trained
            return files_of(Store.read(source).config.get("data") or {}) or {}
    return {}


def _name(whole: Path, final: Path) -> None:
    """Rename the folder `whole` to `final`. Raises PlaitError if that name has been taken meanwhile."""
    sync(whole)
    if final.exists() or final.is_symlink():
        raise PlaitError(f"{final} appeared while it was being converted; it is left as it is, so name a new folder")
    os.rename(whole, final)  # fails, and does not replace, if a file or a non-empty folder has just appeared
    sync(final.parent)


def _most(pieces: list[ConvertedTensor]) -> torch.dtype:
    """The dtype of most bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for piece in pieces:
        sizes[piece.dtype] += piece.bytes
    return sizes.most_common(1)[0][0] if sizes else torch.float32


@contextlib.contextmanager
def opened(path: Path) -> Any:
    """The tensors at `path` as a `Source`. Compares digests if there are any."""
    if (path / MANIFEST).is_file():
        if problem := Store.verify(path):
            raise PlaitError(f"the checkpoint {path} cannot be converted: {problem}")
        yield _Checkpoint(path)
        return
    check_sums(path)
    with contextlib.ExitStack() as files:
        yield _Safetensors(path, files)


class _Safetensors:
    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        weights = open_files(path)
        self.what, self.shapes = str(path), weights.shapes
        handles = {file: stack.enter_context(safe_open(file, framework="pt")) for file in set(weights.where.values())}
        self._of = {name: handles[file] for name, file in weights.where.items()}
        self.dtypes: dict[str, torch.dtype] = {}
        for name, handle in self._of.items():
            kind = handle.get_slice(name).get_dtype()
            if kind not in DTYPES:
                raise PlaitError(f"{name!r} in {path} is of {kind}, quantised: Plait converts only unquantised weights")
            self.dtypes[name] = DTYPES[kind]

    def read(self, name: str, index: int | None = None) -> Tensor:
        if index is None:
            return self._of[name].get_tensor(name)
        return self._of[name].get_slice(name)[index].clone()  # a view would keep the whole tensor


class _Checkpoint:
    """A Plait checkpoint. Its tensors are read whole; the last is kept, because a stack is requested slice by slice."""

    def __init__(self, path: Path) -> None:
        from plait.checkpoint import reader

        self.what, self._reader = f"the checkpoint {path}", reader.Reader(path)
        manifest = self._reader.manifest
        Store.check_replicas(manifest, {})
        for name, (_, dtype) in manifest.parameters.items():
            if dtype not in reader.DTYPES:
                raise PlaitError(f"{name!r} in {path} is of {dtype[:40]!r}, which is not a torch dtype")
        self.shapes: Mapping[str, tuple[int, ...]] = {n: tuple(s) for n, (s, _) in manifest.parameters.items()}
        self.dtypes = {name: reader.DTYPES[dtype] for name, (_, dtype) in manifest.parameters.items()}
        self._last: tuple[str, Tensor] | None = None

    def read(self, name: str, index: int | None = None) -> Tensor:
        from plait.checkpoint.load import fill

        if self._last is None or self._last[0] != name:
            self._last = None
            tensor = torch.empty(self.shapes[name], dtype=self.dtypes[name])
            fill(self._reader, {f"model.{name}": tensor})
            self._last = name, tensor
        tensor = self._last[1]
        return tensor if index is None else tensor[index].clone()
