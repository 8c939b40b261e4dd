"""Which safetensors files at a path are the weights, and what they hold.

Of a folder that has several sets of weights, those are read that Hugging Face's `from_pretrained` reads.
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import attrs
from safetensors import SafetensorError, safe_open

from plait.contract.errors import PlaitError
from plait.system.disk import check_regular

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
KEY = "checkpoint.init_from"
FLOATS = {"F64", "F32", "F16", "BF16"}  # that hold a weight by themselves
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER = "adapter_config.json"
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<variant>\..+)?\.safetensors")

POINTER = b"version https://git-lfs"


@attrs.frozen
class Files:
    """Several safetensors files as one: name -> file, name -> shape, name -> dtype as safetensors calls it."""

    path: Path
    where: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]


def open_files(path: Path) -> Files:
    """Raises PlaitError if there are none, if they cannot be read, or if it is not clear which of them to read."""
    files = [path]
    if path.is_dir():
        files = _of_folder(path)
    elif not os.path.lexists(path):
        raise PlaitError(f"there are no weights at {path}: no such file or folder")
    where: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for file in files:
        try:
            check_regular(file)
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    if name in where:
                        raise PlaitError(f"{name!r} is in both {where[name]} and {file}")
                    one = tensors.get_slice(name)
                    where[name], shapes[name], dtypes[name] = file, tuple(one.get_shape()), one.get_dtype()
        except (SafetensorError, OSError) as error:
            if isinstance(error, SafetensorError) and is_pointer(file):  # a regular file, which does not block
                raise PlaitError(
                    f"{file} is a pointer of Git LFS, not the weights: run git lfs pull in its folder"
                ) from None
            raise PlaitError(f"{file} is not a readable safetensors file: {error}") from None
    return Files(path, where, shapes, dtypes)


def check_floating(files: Files, names: Iterable[str]) -> None:
    """Raises PlaitError if some of these tensors are stored as integers or in 8 bits or fewer.

    Such numbers are weights only together with scales, which lie beside them under the quantiser's own names.
    """
    wanted = [name for name in names if name in files.dtypes]
    if not (odd := sorted(name for name in wanted if files.dtypes[name] not in FLOATS)):
        return
    scale = next((name for name in sorted(files.shapes) if name.startswith(odd[0]) and name != odd[0]), None)
    beside = f", with {scale!r} beside it" if scale else ""
    kinds = ", ".join(sorted({files.dtypes[name] for name in odd}))
    raise PlaitError(
        f"{len(odd)} of the {len(wanted)} tensors of this model in {files.path} are stored as {kinds}, such as "
        f"{odd[0]!r}{beside}: they are quantised, and Plait starts from floating-point weights; save the model without "
        "quantisation first"
    ).at(KEY, str(files.path), fits=f"weights in {', '.join(sorted(FLOATS))}")


def _of_folder(folder: Path) -> list[Path]:
    if os.path.lexists(folder / ADAPTER):
        raise PlaitError(
            f"the folder {folder} holds an adapter ({ADAPTER}), and Plait starts from whole weights: name its run or "
            "checkpoint instead, merge it into its base first, or move it elsewhere"
        ).at(KEY, str(folder), fits="a folder of whole weights")
    if os.path.lexists(folder / WHOLE):
        return [folder / WHOLE]
    if files := _indexed(folder):
        return files
    files = sorted(folder.glob("*.safetensors"))
    pickled = next((name for name in PICKLED if os.path.lexists(folder / name)), None)
    if pickled and files:
        raise PlaitError(
            f"the folder {folder} holds {pickled}, which from_pretrained would read, and {files[0].name}, which is not "
            f"{WHOLE}: save the right one as {WHOLE}, or name the file itself"
        ).at(KEY, str(folder), fits="a folder with one set of weights")
    if not files:
        instead = f", but {pickled}, which is pickled: save it as safetensors" if pickled else ""
        raise PlaitError(f"the folder {folder} holds neither a checkpoint of Plait nor .safetensors files{instead}")
    _check_one_set(folder, files)
    return files


def _check_one_set(folder: Path, files: list[Path]) -> None:
    """Raises PlaitError if some of the files, which no index lists, are shards of something else, or lack one."""
    shards = {file.name: found for file in files if (found := SHARD.fullmatch(file.name))}
    for name, shard in shards.items():
        kin = shard["stem"], shard["count"], shard["variant"]
        for other in files:
            its = shards.get(other.name)
            if its is None or (its["stem"], its["count"], its["variant"]) != kin:
                raise PlaitError(
                    f"the folder {folder} holds several sets of weights, among them {name} and {other.name}, and no "
                    f"{INDEX} that says which to read: move one of them elsewhere"
                ).at(KEY, str(folder), fits="a folder with one set of weights")
        there = {int(found["number"]) for found in shards.values()}
        for number in range(1, int(shard["count"]) + 1):
            if number not in there:
                lacks = f"{shard['stem']}-{number:05}-of-{shard['count']}{shard['variant'] or ''}.safetensors"
                raise PlaitError(f"the folder {folder} has {name}, but lacks {lacks}").at(
                    KEY, str(folder), fits="a folder with all shards"
                )
        return


def _indexed(folder: Path) -> list[Path]:
    """The files that the folder's index names, if it has one."""
    try:
        check_regular(folder / INDEX)
        index = json.loads((folder / INDEX).read_bytes())
        names = set(index["weight_map"].values())
        if outside := [name for name in names if Path(name).name != name]:
            raise PlaitError(f"the index {folder / INDEX} names {outside[0]!r}, which is not in its folder")
        for name in sorted(names):
            if not os.path.lexists(folder / name):
                raise PlaitError(f"the index {folder / INDEX} names {name}, which is not there").at(
                    KEY, str(folder), fits="a folder with all files of its index"
                )
        return sorted(folder / name for name in names)
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise PlaitError(f"the index {folder / INDEX} cannot be read: {error}") from None


def is_pointer(file: Path) -> bool:
    """Whether Git LFS left a pointer in place of the file's content."""
    with file.open("rb") as opened:
        return opened.read(len(POINTER)) == POINTER
