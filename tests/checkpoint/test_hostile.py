"""Checkpoints that somebody wrote to run what they like: every way that reads one refuses it, and nothing runs."""

import io
import os
import pickle
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from plait.checkpoint.load import load
from plait.contract.errors import PlaitError
from tests.helpers.hostile import PICKLES, WAYS, A, B, Calls, checkpoint, metadata_of, plant, saved, sign, text

_names: list[str] | None = None  # those that Python's unpickler looks up, while a test wants to know


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _names is not None and event == "pickle.find_class":
        _names.append(f"{arguments[0]}.{arguments[1]}")


sys.addaudithook(_hook)


@pytest.fixture
def unpickled() -> Iterator[list[str]]:
    global _names
    _names = []
    yield _names
    _names = None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return checkpoint(tmp_path)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_in_place_of_the_metadata_is_refused(
    path: Path, marker: Path, name: str, unpickled: list[str]
) -> None:
    plant(path, PICKLES[name](f"touch {marker}"))
    for way in WAYS.values():
        unpickled.clear()
        with pytest.raises(
            PlaitError, match=r"its \.metadata is refused, since it (names|has the instruction|calls) "
        ) as caught:
            way(path)
        assert not marker.exists()
        assert unpickled == []
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_unpickled_of_a_sound_one(path: Path, way: str, unpickled: list[str]) -> None:
    WAYS[way](path)
    assert unpickled == []


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_is_read_whatever_the_protocol(path: Path, protocol: int) -> None:
    plant(path, pickle.dumps(metadata_of(path), protocol))
    a, b = torch.zeros(4, 3), torch.zeros(3)
    load(path, {"model.a": a, "model.b": b})
    assert torch.equal(a, A)
    assert torch.equal(b, B.float())


def test_metadata_that_other_pythons_wrote_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, enum = (path / ".metadata").read_bytes(), dcp_metadata._MEM_FORMAT_ENCODING
    assert text("pathlib") in content
    of_3_13 = content.replace(text("pathlib"), text("pathlib._local"))
    metadata = metadata_of(path)
    monkeypatch.setattr(enum, "__reduce_ex__", lambda member, _: (getattr, (enum, member.name)))
    of_3_11_4 = pickle.dumps(metadata)
    assert text("getattr") in of_3_11_4
    for written in (of_3_13, of_3_11_4):
        a = torch.zeros(4, 3)
        load(plant(path, written), {"model.a": a})
        assert torch.equal(a, A)


@pytest.mark.parametrize("way", WAYS)
def test_an_entry_of_bytes_is_refused(path: Path, marker: Path, way: str) -> None:
    """torch unpickles such an entry without a restriction, as soon as its name is asked for."""
    payload = saved(Calls(os.system, f"touch {marker}"))
    (path / "__0_0.distcp").write_bytes(payload)
    metadata = metadata_of(path)
    place = metadata.storage_data[MetadataIndex("model.a", [0, 0])]
    place.offset, place.length = 0, len(payload)
    metadata.state_dict_metadata["model.a"] = BytesStorageMetadata()
    metadata.storage_data = {MetadataIndex("model.a"): place}
    plant(path, pickle.dumps(metadata))
    with pytest.raises(PlaitError, match=r"'model\.a' is bytes to unpickle, not a tensor"):
        WAYS[way](path)
    assert not marker.exists()


def test_metadata_of_one_rank_is_not_tried_instead(path: Path, marker: Path) -> None:
    """torch takes `__0.metadata` if it cannot read `.metadata`."""
    (path / "__0.metadata").write_bytes(pickle.dumps(Calls(os.system, f"touch {marker}")))
    (path / ".metadata").unlink()
    with pytest.raises(PlaitError, match="the manifest does not list it"):
        load(sign(path), {"model.a": torch.zeros(4, 3)})
    assert not marker.exists()


def within_torchs_file(call: bytes) -> bytes:
    """A file as `torch.save` writes it, whose own pickle is `call`."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(A))) as source, zipfile.ZipFile(file, "w") as target:
        for name in source.namelist():
            target.writestr(name, call if name.endswith("data.pkl") else source.read(name))
    return file.getvalue()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["a pickle", "a pickle in a file of torch's"])
def test_a_pickle_in_place_of_tensors_is_refused(path: Path, marker: Path, way: str, kind: str) -> None:
    payload = pickle.dumps(Calls(os.system, f"touch {marker}"), 2)
    payload = payload + bytes(100) if kind == "a pickle" else within_torchs_file(payload)
    (path / "__0_0.distcp").write_bytes(payload)
    metadata = metadata_of(path)
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, len(payload)
    plant(path, pickle.dumps(metadata))
    with pytest.raises(PlaitError, match="holds something other than tensors") as caught:
        WAYS[way](path)
    assert not marker.exists()
    assert "weights_only" not in str(caught.value)  # torch's own message says how to run it all the same
