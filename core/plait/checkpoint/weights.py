"""Weights in files: what others or a run wrote, read one tensor at a time, and folders that other tools read."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from plait.checkpoint.best import checkpoint_at
from plait.checkpoint.files import put_in_place, sync, write_synced
from plait.checkpoint.store import MANIFEST, Store
from plait.checkpoint.sums import check_sums, write_sums
from plait.checkpoint.weight_files import INDEX, open_files
from plait.contract.errors import PlaitError
from plait.data.tokenizer_files import files_in, files_of
from plait.parallel.state import canonical, tied_names
from plait.system.disk import writing

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}


class Weights(Protocol):
    """Tensors that are read on request.

    what: their place, as errors name it. shapes, dtypes: name -> shape and dtype of each tensor.
    beside: name -> text of the tokenizer's files that belong to them, if they are there: those in their folder, or the
        ones that the data of a checkpoint's run names.
    """

    what: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    beside: Mapping[str, str]

    def read(self, name: str, index: int | None = None) -> Tensor:
        """The tensor, or only index `index` of its dim 0."""


@contextlib.contextmanager
def read(path: str | os.PathLike[str]) -> Iterator[Weights]:
    """The weights at `path`, a .safetensors file, a folder of them, or a checkpoint (runs/NAME/checkpoints/step-N).

    Compares digests if there are any. Raises PlaitError for what cannot be read, or was changed.
    """
    path = checkpoint_at(path)
    if (path / MANIFEST).is_file():
        if problem := Store.verify(path):
            raise PlaitError(f"the checkpoint {path} cannot be read: {problem}")
        yield _Checkpoint(path)
        return
    check_sums(path)
    with contextlib.ExitStack() as files:
        yield _Safetensors(path, files)


def check_new(folder: str | os.PathLike[str]) -> None:
    """Raises PlaitError if `write` could not create `folder`, because it exists or something is in the way."""
    folder = Path(folder)
    if folder.exists() or folder.is_symlink():
        raise PlaitError(f"{folder} exists already; name a new folder")
    if (partial := _partial(folder)).exists():
        raise PlaitError(f"{partial} is in the way: a command that was killed left it there; remove it first")


def write(
    folder: str | os.PathLike[str],
    sizes: Mapping[str, int],
    tensor: Callable[[str], Tensor],
    beside: Mapping[str, str] | None = None,
    *,
    stem: str = "model",
    max_shard_bytes: float = 5e9,
    replace: bool = False,
    progress: Callable[[str, int, int], None] = lambda file, done, total: None,
) -> None:
    """Write one file `<stem>.safetensors` to `folder`, or several with an index, named as Hugging Face does, and a
    SHA256SUMS.

    sizes:    name -> bytes of every tensor, in their order in the files.
    tensor:   returns the one with a name, contiguous on the CPU; called once for each, in this order. The tensors of
        one file are in memory together.
    beside:   name -> text of further files of the folder, such as config.json.
    max_shard_bytes: of a file, if it has more than one tensor.
    replace:  whether a folder of that name is replaced; otherwise PlaitError is raised, also if it appears meanwhile.
    progress: called after each tensor with its file, the bytes done and the bytes in total.

    The folder appears complete or not at all. Raises DiskError if it cannot be written.
    """
    folder, partial = Path(folder), _partial(Path(folder))
    if replace:
        shutil.rmtree(partial, ignore_errors=True)
    else:
        check_new(folder)
    files, total, done = split(sizes, max_shard_bytes, stem), sum(sizes.values()), 0
    with writing(folder, "the weights in"):
        partial.mkdir(parents=True, exist_ok=replace)  # one that has just appeared is not this process's to remove
        try:
            for file, names in files.items():
                held: dict[str, Tensor] = {}
                for name in names:
                    held[name] = tensor(name)
                    done += sizes[name]
                    progress(file, done, total)
                _write_file(held, partial / file)
            if len(files) > 1:
                where = {name: file for file, names in files.items() for name in names}
                index = {"metadata": {"total_size": total}, "weight_map": where}
                write_synced(partial / INDEX.replace("model", stem, 1), json.dumps(index, indent=2) + "\n")
            for name, text in (beside or {}).items():
                write_synced(partial / name, text)
            write_sums(partial)
            put_in_place(partial, folder) if replace else _name(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def of(model: nn.Module) -> dict[str, Tensor]:
    """Name -> tensor of all parameters and persistent buffers, as checkpoints name them; a tied one under its first
    name."""
    aliases = tied_names(model)
    state = {canonical(key): tensor.detach() for key, tensor in model.state_dict().items()}
    return {fqn: tensor for fqn, tensor in state.items() if fqn not in aliases}


def ties(model: nn.Module) -> dict[str, str]:
    """Further name of a tied tensor -> its first, which `of` has."""
    return tied_names(model)


def split(sizes: Mapping[str, int], max_shard_bytes: float, stem: str = "model") -> dict[str, list[str]]:
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
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _write_file(tensors: Mapping[str, Tensor], file: Path) -> None:
    file.touch()
    mode = file.stat().st_mode  # as the user's other files; safetensors writes files that only the owner may read
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(mode)
    sync(file)


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + ".tmp")


def _name(whole: Path, final: Path) -> None:
    """Rename the folder `whole` to `final`. Raises PlaitError if that name has been taken meanwhile."""
    sync(whole)
    if final.exists() or final.is_symlink():
        raise PlaitError(f"{final} appeared while it was being written; it is left as it is, so name a new folder")
    os.rename(whole, final)  # fails, and does not replace, if a file or a non-empty folder has just appeared
    sync(final.parent)


class _Safetensors:
    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        files = open_files(path)
        self.what = str(path)
        self.shapes: Mapping[str, tuple[int, ...]] = files.shapes
        self.beside: Mapping[str, str] = files_in(path, ("generation_config.json",)) if path.is_dir() else {}
        handles = {file: stack.enter_context(safe_open(file, framework="pt")) for file in set(files.where.values())}
        self._of = {name: handles[file] for name, file in files.where.items()}
        for name, kind in files.dtypes.items():
            if kind not in DTYPES:
                raise PlaitError(f"{name!r} in {path} is of {kind}, quantised: Plait reads only unquantised weights")
        self.dtypes: Mapping[str, torch.dtype] = {name: DTYPES[kind] for name, kind in files.dtypes.items()}

    def read(self, name: str, index: int | None = None) -> Tensor:
        if index is None:
            return self._of[name].get_tensor(name)
        return self._of[name].get_slice(name)[index].clone()  # a view would keep the whole tensor


class _Checkpoint:
    """Its tensors are read whole; the last is kept, because a stack is requested slice by slice."""

    def __init__(self, path: Path) -> None:
        from plait.checkpoint import reader

        self.what, self._reader = f"the checkpoint {path}", reader.Reader(path)
        manifest = self._reader.manifest
        self.beside: Mapping[str, str] = {}
        with contextlib.suppress(OSError, ValueError, PlaitError):  # it was elsewhere when the run was trained
            self.beside = files_of(manifest.config.get("data") or {}) or {}
        Store.check_replicas(manifest, {})
        for name, (_, dtype) in manifest.parameters.items():
            if dtype not in reader.DTYPES:
                raise PlaitError(f"{name!r} in {path} is of {dtype[:40]!r}, which is not a torch dtype")
        self.shapes: Mapping[str, tuple[int, ...]] = {n: tuple(s) for n, (s, _) in manifest.parameters.items()}
        dtypes = {name: reader.DTYPES[dtype] for name, (_, dtype) in manifest.parameters.items()}
        self.dtypes: Mapping[str, torch.dtype] = dtypes
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
