"""Metadata and manifests that no save wrote: what cannot be is refused before anything is opened or allocated."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Size
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from plait.checkpoint.load import load
from plait.checkpoint.reader import LARGEST
from plait.checkpoint.store import MANIFEST, Store
from plait.contract.errors import PlaitError
from plait_models.convert import convert
from tests.helpers.hostile import OURS, START, Mine, checkpoint, metadata_of, named, plant, sign, text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return checkpoint(tmp_path)


def read(path: Path) -> None:
    load(path, {"model.a": torch.zeros(4, 3)})


def file(metadata: Metadata, name: str) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = name


def entry(metadata: Metadata, **fields: Any) -> None:
    vars(metadata.state_dict_metadata["model.a"]).update(fields)


def part(metadata: Metadata, **fields: Any) -> None:
    vars(metadata.state_dict_metadata["model.a"].chunks[0]).update(fields)


def place(metadata: Metadata, **fields: Any) -> None:
    vars(metadata.storage_data[MetadataIndex("model.a", [0, 0])]).update(fields)


def huge(metadata: Metadata) -> None:
    entry(metadata, size=Size([1 << 40, 1 << 20]))
    part(metadata, sizes=Size([1 << 40, 1 << 20]))


CHANGES: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "a file above": (lambda m: file(m, "../step-2/x"), r"the file '\.\./step-2/x', which the manifest does not list"),
    "a file anywhere": (lambda m: file(m, "/etc/hosts"), "the file '/etc/hosts', which the manifest does not list"),
    "the manifest": (lambda m: file(m, MANIFEST), f"'{MANIFEST}', which the manifest does not list"),
    "a size past all memory": (lambda m: entry(m, size=Size([1 << 40, 1 << 20])), "12 elements together, and it has"),
    "a part past all memory": (huge, r"a part of 'model\.a' has \d+ elements, for which \d+ bytes are too few"),
    "a part outside": (lambda m: part(m, sizes=Size([5, 3])), r"a part of 'model\.a' lies outside of it"),
    "a part missing": (lambda m: entry(m, chunks=[]), "have 0 elements together, and it has 12"),
    "a part elsewhere": (lambda m: part(m, offsets=Size([1, 0]), sizes=Size([3, 3])), r"at \(1, 0\) lies"),
    "parts of other dims": (lambda m: part(m, sizes=Size([12])), "are not of 2 dims"),
    "dims without end": (lambda m: entry(m, size=Size([1] * 65)), "a size in it is not a short list"),
    "a size below nothing": (
        lambda m: entry(m, size=(-4, -3)),
        "the field size of a TensorStorageMetadata is not a Size",
    ),
    "bytes past the file": (lambda m: place(m, length=1 << 60), r"looks for bytes \d+ to \d+ in __0_0\.distcp"),
    "bytes before the file": (lambda m: place(m, offset=-1), "looks for bytes -1"),
    "compression": (lambda m: place(m, transform_descriptors=["stream.zstd/1"]), "in a form that Plait never writes"),
    "no places": (lambda m: m.storage_data.clear(), r"does not say where the part of 'model\.a' at \(0, 0\) lies"),
    "a list for a dict": (lambda m: setattr(m, "state_dict_metadata", []), "state_dict_metadata of a Metadata is no"),
    "a further field": (lambda m: entry(m, more=1), "gives a TensorStorageMetadata fields that it does not have"),
    "a number for an entry": (
        lambda m: vars(m)["state_dict_metadata"].update(x=1),
        "an entry that is not a named tensor",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_cannot_be_is_refused(path: Path, name: str) -> None:
    change, message = CHANGES[name]
    metadata = metadata_of(path)
    change(metadata)
    plant(path, pickle.dumps(metadata))
    with pytest.raises(PlaitError, match=message):
        read(path)


# A tuple of two of a tuple of two ...: as a key of a dict it would be hashed in 2 ** 60 steps.
DOUBLED = b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(60))
NO_PICKLES = {
    "a memo of 64 GB": START + b"Nr\xf0\xff\xff\xff.",
    "an array of 2 ** 60 bytes": START + b"\x96" + (1 << 60).to_bytes(8, "little") + b".",
    "a text of 4 GB": START + b"X\xff\xff\xff\xff.",
    "a key that takes ages": START + b"}K\x01\x94" + DOUBLED + b"K\x01s.",
    "a call with very many arguments": START + named("pathlib", "PosixPath") + b"(" + b"N" * 2000 + b"tR.",
    "an attribute of a class": START
    + named("builtins", "getattr")
    + named(OURS, "Metadata")
    + text("__init__")
    + b"\x86R.",
    "nothing": b"",
    "a torn one": START + b"}(",
    "too few values": START + b"\x86.",
    "another value": START + b"N.",
    "deep lists": START + b"]" * 100_000 + b"a" * 99_999 + b".",
    "an object without fields": START + named(OURS, "Metadata") + b")\x81.",
    "a state for a list": START + b"]}b.",
    "an attribute of a list": START + b"]N}" + named(OURS, "Metadata") + b"Nsb.",
}


@pytest.mark.parametrize("name", NO_PICKLES)
def test_what_no_save_pickles_is_refused(path: Path, name: str) -> None:
    plant(path, NO_PICKLES[name])
    with pytest.raises(PlaitError, match=r"its \.metadata is refused, since "):
        read(path)


def test_every_torn_or_flipped_metadata_is_refused_or_read(path: Path) -> None:
    content = (path / ".metadata").read_bytes()
    refused = 0
    for at in range(0, len(content), 13):
        for damaged in (content[:at], content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]):
            plant(path, damaged)
            try:
                read(path)
            except PlaitError:
                refused += 1
    assert refused > len(content) / 13


def test_metadata_larger_than_any_is_not_read(path: Path) -> None:
    sign(path, files={".metadata": [LARGEST + 1, "0"]})
    os.truncate(path / ".metadata", LARGEST + 1)  # a hole, which takes no room on the disk
    with pytest.raises(PlaitError, match=f"it has {LARGEST + 1} bytes, and no checkpoint needs more"):
        read(path)


def test_bytes_that_no_tensor_needs_are_not_read(path: Path) -> None:
    """A hole takes no room on the disk, and memory when it is read."""
    os.truncate(path / "__0_0.distcp", 1 << 24)
    metadata = metadata_of(path)
    place(metadata, offset=0, length=1 << 24)
    plant(path, pickle.dumps(metadata))
    with pytest.raises(
        PlaitError, match=r"a part of 'model\.a' has 12 elements, for which 16777216 bytes are too many"
    ):
        read(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": "7"}, "step and tokens must be whole numbers"),
        ({"tokens": -1}, "step and tokens must be whole numbers"),
        ({"step": 2**63}, "step and tokens must be whole numbers of 64 bits"),
        ({"config": []}, "config must be an object"),
        ({"config": {"train": []}}, "config.train must be an object"),
        ({"data": {"samples": "7"}}, "data.samples must be a whole number of 64 bits from 0 on"),
        ({"data": {"global_batch_size": 0}}, "data.global_batch_size must be a whole number of 64 bits from 1"),
        ({"data": {"metrics": [1, 2]}}, "data.metrics must be a size and a digest"),
        ({"data": {"states": [3]}}, "data.states must be a list of objects"),
        ({"data": {"states": [{}], "shares": 2}}, "data.states has 1 entries for 2 shares"),
        ({"_target_": "os.system"}, "it has the key '_target_'"),
        ({"parameters": {"a": [["x"], "float32"]}}, r"parameters\['a'\] must be a shape and a dtype"),
        ({"parameters": {"a": 3}}, r"parameters\['a'\] must be a shape and a dtype"),
        ({"files": {"../x": [1, "0"]}}, r"files has '\.\./x', which is not the name of a file in the folder"),
        ({"files": {"/etc/passwd": [1, "0"]}}, "files has '/etc/passwd'"),
        ({"files": {"x": ["1", "0"]}}, r"files\['x'\] must be a size and a digest"),
        ({"files": {"x": [1, None]}}, r"files\['x'\] must be a size and a digest"),
    ],
)
def test_a_manifest_that_no_save_writes_is_refused(path: Path, changes: dict[str, Any], message: str) -> None:
    sign(path, **changes)
    assert "holds something that this version of Plait does not write" in (Store.verify(path) or "")
    with pytest.raises(PlaitError, match=message):
        Store.read(path)


def test_a_manifest_nested_without_end(path: Path) -> None:
    (path / MANIFEST).write_text("[" * 200_000)
    assert Store.verify(path) == f"its {MANIFEST} is broken"


def test_a_dtype_is_not_looked_up_in_torch_by_its_name(path: Path) -> None:
    sign(path, parameters={"a": [[4, 3], "load"], "b": [[3], "bfloat16"]})
    with pytest.raises(PlaitError, match=r"'a' in .* is of 'load', which is not a torch dtype"):
        convert(Mine(), path, path.parent / "converted", "hf")
