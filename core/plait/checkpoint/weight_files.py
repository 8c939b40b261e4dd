"""Which safetensors files at a path are the weights, and what they hold."""

import json
import os
from pathlib import Path

import attrs
from safetensors import SafetensorError, safe_open

from plait.contract.errors import PlaitError
from plait.system.disk import check_regular

INDEX = "model.safetensors.index.json"


@attrs.frozen
class Files:
    """Several safetensors files as one: name -> file, name -> shape."""

    path: Path
    where: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]


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
