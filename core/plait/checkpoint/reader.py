"""Makes torch's DCP read a checkpoint's folder without running any code in it.

By default torch unpickles `.metadata`, and every entry that it declares as bytes. This reader parses the metadata with
`pickled.read` and a closed table of names, refuses bytes, and opens only files that the manifest lists. All that it
reads is compared with its digest before it is used.
"""

import dataclasses
import io
import math
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from plait.checkpoint.checked import CheckedFile
from plait.checkpoint.pickled import Refused, read
from plait.checkpoint.pieces import Seal
from plait.checkpoint.store import Store
from plait.contract.errors import PlaitError
from plait.system.disk import place
from plait.system.torch_internals.checkpoint_files import MENTIONED, StorageInfo

METADATA = ".metadata"
LARGEST = 1 << 32  # bytes; the metadata of 70 billion parameters on 256 ranks has 80 million
MOST_DIMS = 64  # what torch itself allows
AROUND = 1 << 16  # bytes that `torch.save` may add to those of a tensor
DTYPES: dict[str, torch.dtype] = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}


class Reader(dcp.FileSystemReader):
    """The checkpoint at `path`; its metadata is read once.

    Raises PlaitError if the metadata is not what torch writes for tensors, and Damaged if there is no manifest, or if
    what is read was changed, is missing or cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(str(path))
        self.path = place(path)
        self.manifest = Store.read(path)
        self._folder, self._files = place(path), self.manifest.files
        try:
            self.metadata = _checked(_metadata(self._folder, self._files), self._files)
            entries: Mapping[str, Any] = self.metadata.state_dict_metadata
        except (Refused, AttributeError) as error:  # AttributeError if an object never got its fields
            why = error if isinstance(error, Refused) else "an object in it has no fields"
            raise PlaitError(f"the checkpoint {path} cannot be read: its {METADATA} is refused, since {why}") from None
        self.shapes = {key: tuple(entry.size) for key, entry in entries.items()}

    def read_metadata(self) -> Metadata:  # given **kwargs, torch would try further files
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Each part that is needed is read once, in the order of its file; tensors by
        `torch.load(weights_only=True)`."""
        needed: dict[str, dict[tuple[int, int], list[ReadItem]]] = {}  # file -> (offset, bytes) -> what it is for
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            needed.setdefault(place.relative_path, {}).setdefault((place.offset, place.length), []).append(item)
        for name, parts in sorted(needed.items()):
            with CheckedFile(self._folder, name, self._files) as file:
                for offset, length in sorted(parts):
                    saved = _tensor(file.read(offset, length))
                    for item in parts[offset, length]:
                        _give(saved, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _tensor(data: memoryview) -> Tensor:
    try:
        tensor = torch.load(cast(Any, _Bytes(data)), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's own message says how to run it anyway
        tensor = None
    if not isinstance(tensor, Tensor):
        raise PlaitError("one of its files holds something other than tensors; none of that was run")
    return tensor


def _give(saved: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    """Copy the region of a saved part that `item` names to where the planner wants it."""
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        saved = saved.narrow(dim, start, length)
    wanted = planner.resolve_tensor(item).detach()
    wanted.copy_(saved)
    planner.commit_tensor(item, wanted)


class _Bytes(io.RawIOBase):
    """A file that is in memory already; a BytesIO would copy it."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        taken = self._data[self._at : self._at + len(into)]
        into[: len(taken)] = taken
        self._at += len(taken)
        return len(taken)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at

    def tell(self) -> int:
        return self._at


def _metadata(folder: Path, files: Mapping[str, Seal]) -> Any:
    if METADATA not in files:
        raise Refused("the manifest does not list it")
    size, _ = files[METADATA]
    if size > LARGEST:
        raise Refused(f"it has {size} bytes, and no checkpoint needs more than {LARGEST}")
    with CheckedFile(folder, METADATA, files) as file:
        data = bytes(file.read(0, size))
    return read(data, NAMES, dict.fromkeys(FIELDS, _fill) | {TensorProperties: _fill_properties}, {str, MetadataIndex})


def _checked(metadata: Any, files: Mapping[str, Seal]) -> Metadata:
    if type(metadata) is not Metadata:
        raise Refused("it holds something else")
    for part in metadata.storage_data.values():
        if type(part) is not StorageInfo or part.transform_descriptors:
            raise Refused("it says where tensors are in a form that Plait never writes")
        if part.relative_path not in files:
            raise Refused(f"it names the file {part.relative_path!r}, which the manifest does not list")
        size, _ = files[part.relative_path]
        if not 0 <= part.offset <= part.offset + part.length <= size:
            raise Refused(
                f"it looks for bytes {part.offset} to {part.offset + part.length} in {part.relative_path}, "
                f"which has {size}"
            )
    for key, entry in metadata.state_dict_metadata.items():
        if type(entry) is BytesStorageMetadata:
            raise Refused(f"{key!r} is bytes to unpickle, not a tensor")
        if type(key) is not str or type(entry) is not TensorStorageMetadata:
            raise Refused("it has an entry that is not a named tensor")
        _check_parts(key, entry, metadata.storage_data)
    metadata.planner_data, metadata.storage_meta = None, StorageMeta()  # loading uses neither
    return metadata


def _check_parts(key: str, entry: TensorStorageMetadata, places: Mapping[Any, StorageInfo]) -> None:
    """Checks that the parts of a tensor lie inside it, have as many elements as it has, and fit in their files."""
    elements = 0
    for part in entry.chunks:
        if type(part) is not ChunkStorageMetadata or not len(part.offsets) == len(part.sizes) == len(entry.size):
            raise Refused(f"the parts of {key!r} are not of {len(entry.size)} dims")
        if any(at + n > whole for at, n, whole in zip(part.offsets, part.sizes, entry.size, strict=True)):
            raise Refused(f"a part of {key!r} lies outside of it")
        place = places.get(MetadataIndex(key, part.offsets))
        if place is None:
            raise Refused(f"it does not say where the part of {key!r} at {tuple(part.offsets)} lies")
        count = math.prod(part.sizes)
        if count * entry.properties.dtype.itemsize > place.length:
            raise Refused(f"a part of {key!r} has {count} elements, for which {place.length} bytes are too few")
        if count * entry.properties.dtype.itemsize + AROUND < place.length:
            raise Refused(f"a part of {key!r} has {count} elements, for which {place.length} bytes are too many")
        elements += count
    if elements != math.prod(entry.size):
        raise Refused(f"the parts of {key!r} have {elements} elements together, and it has {math.prod(entry.size)}")


def _size(dims: Any = ()) -> torch.Size:
    if type(dims) not in (tuple, list) or len(dims) > MOST_DIMS:
        raise Refused("a size in it is not a short list")
    for dim in dims:
        if type(dim) is not int or not 0 <= dim < 1 << 63:
            raise Refused(f"it has a size of {dim!r:.40}")
    return torch.Size(dims)


def _unused(*arguments: Any) -> None:
    """For fields that loading does not need: layouts, memory formats, the folder where the checkpoint was written."""


def _member(of: Any, name: Any) -> None:
    """How Python before 3.11.5 pickled a member of an enum: as an attribute of its class."""
    if of is not _unused or not isinstance(name, str):
        raise Refused("it names an attribute of something other than a torch enum")


# The fields of each class that are checked, and their types; fields that torch may add are accepted unchecked.
FIELDS: dict[type, dict[str, Any]] = {
    Metadata: {"state_dict_metadata": dict, "storage_data": dict},
    TensorStorageMetadata: {"properties": TensorProperties, "size": torch.Size, "chunks": list},
    ChunkStorageMetadata: {"offsets": torch.Size, "sizes": torch.Size},
    BytesStorageMetadata: {},
    MetadataIndex: {"fqn": str},
    StorageInfo: {"relative_path": str, "offset": int, "length": int},
    StorageMeta: {},
}
KNOWN = {cls: {field.name for field in dataclasses.fields(cls)} for cls in FIELDS}
NAMES: dict[tuple[str, str], Any] = {
    **{("torch", name): kind for name, kind in DTYPES.items()},
    **{(cls.__module__, cls.__name__): cls for cls in (*FIELDS, TensorProperties)},
    ("torch", "Size"): _size,
    **dict.fromkeys(MENTIONED, _unused),
    **{(module, "getattr"): _member for module in ("builtins", "__builtin__")},  # the latter up to protocol 2
    **{(module, f"{kind}Path"): _unused for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")},
}


def _fill(record: Any, state: Any) -> None:
    cls = type(record)
    if type(state) is not dict or not state.keys() <= KNOWN[cls]:
        raise Refused(f"it gives a {cls.__name__} fields that it does not have")
    for name, kind in FIELDS[cls].items():
        if type(state.get(name)) is not kind:
            raise Refused(f"the field {name} of a {cls.__name__} is not a {kind.__name__}")
    if cls is MetadataIndex and type(state.get("offset")) not in (torch.Size, type(None)):
        raise Refused("the position of a part is not a list of numbers")
    record.__dict__.update(state)


def _fill_properties(record: TensorProperties, state: Any) -> None:
    if type(state) is not tuple or not state or not isinstance(state[0], torch.dtype):
        raise Refused("a tensor in it has no dtype")
    record.__dict__.update(TensorProperties(state[0]).__dict__)
