"""Checkpoints in an object store: when one is whole, what half an upload is, and what ends a save. No processes."""

import pytest
import torch

from plait.checkpoint.at_address import open_store
from plait.checkpoint.best import checkpoint_at
from plait.checkpoint.choose import choose
from plait.checkpoint.export_at_address import copy_export
from plait.checkpoint.folder_owner import OWNER, check_owner, claim
from plait.checkpoint.init_from import read_weights
from plait.checkpoint.load import load_latest
from plait.checkpoint.save import Saver
from plait.checkpoint.store import MANIFEST, NoneSound, Store
from plait.checkpoint.weights import write
from plait.contract.config import Checkpoint
from plait.contract.errors import PlaitError
from plait.system import objects
from plait.system.disk import place
from plait.system.errors import DiskError
from tests.helpers.object_server import serving


@pytest.fixture(scope="module")
def server():
    with serving() as found:
        yield found


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(objects, "PATIENCE", 0.5)


def state(value):
    return {"weight": torch.full((64, 8), float(value)), "bias": torch.full((3,), float(value))}


@pytest.mark.parametrize("address", ["memory://{}", "s3://runs/{}", "file://{}"])
def test_saves_loads_keeps_and_removes(server, tmp_path, address):
    store = open_store(address.format(f"{tmp_path}/c" if "file" in address else "whole"))
    saver = Saver(store, "async", keep=2)
    for step in (1, 2, 3):
        saver.save(state(step), step)
    saver.wait()
    assert [path.name for path in store.complete()] == ["step-2", "step-3"]
    assert Store.verify(store.path_of(3)) is None
    held = state(0)
    assert load_latest(store, held) == store.path_of(3)
    assert all(bool((tensor == 3).all()) for tensor in held.values())
    store.clean()
    store.prune(1)
    assert [path.name for path in store.folder.iterdir() if "step" in path.name] == ["step-3"]


def test_half_an_upload_is_no_checkpoint(server):
    """Objects without a manifest are not read, are no reason to refuse a start, and are removed."""
    store = open_store("s3://runs/half")
    Saver(store, "sync").save(state(1), 1)
    (store.path_of(2) / "__0_0.distcp").write_bytes(b"half")
    assert store.latest() == store.path_of(1)
    store.clean()
    assert {name.split("/")[0] for name in server.names("half/")} == {"step-1", ".writer"}
    server.client.delete_object(Bucket="runs", Key=f"half/step-1/{MANIFEST}")
    assert store.latest() is None


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:]]
)
def test_a_damaged_object_is_refused(damage):
    store = open_store("memory://damaged")
    saver = Saver(store, "sync", keep=3)
    for step in (1, 2):
        saver.save(state(step), step)
    part = store.path_of(2) / "__0_0.distcp"
    part.write_bytes(damage(part.read_bytes()))
    held, said = state(0), []
    assert load_latest(store, held, newest=lambda: store.latest(said.append)) == store.path_of(1)
    assert any("its file __0_0.distcp" in line for line in said)
    assert bool((held["weight"] == 1).all())
    store.remove(store.path_of(1))
    with pytest.raises(NoneSound):
        load_latest(store, held)
    saver.save(state(2), 2)  # in place of the damaged one
    assert load_latest(open_store("memory://damaged"), held) == store.path_of(2)
    store.remove(store.path_of(1))
    store.remove(store.path_of(2))


def test_a_later_start_ends_the_earlier_one_and_a_part_that_went_away_ends_a_save(monkeypatch):
    earlier, later = (Saver(open_store("memory://two"), "sync") for _ in "ab")
    earlier.save(state(1), 1)
    later.save(state(2), 2)
    with pytest.raises(DiskError, match=r"step 3 .*another start of this run has begun to save there \(process \d+ on"):
        earlier.save(state(3), 3)
    assert [path.name for path in later.store.complete()] == ["step-1", "step-2"]
    commit = later.store.commit

    def robbed(path, manifest):
        (path / "__0_0.distcp").unlink()
        return commit(path, manifest)

    monkeypatch.setattr(later.store, "commit", robbed)
    with pytest.raises(DiskError, match=r"somebody removed or replaced its object __0_0\.distcp"):
        later.save(state(4), 4)
    assert [path.name for path in later.store.found()] == ["step-1", "step-2"]


def test_best_leads_to_its_checkpoint(server):
    store = open_store("s3://runs/best")
    saver = Saver(store, "sync", keep=3)
    for step in (1, 2):
        weights = {f"model.{name}": tensor for name, tensor in state(step).items()}
        saver.save(weights, step, data={"best": {"step": 1, "loss": 1.0, "waited": 0}})
    best = "s3://runs/best/best"
    assert checkpoint_at(best) == store.path_of(1)
    assert checkpoint_at("s3://runs/best/step-2") == store.path_of(2)
    assert choose(Checkpoint(load=best), open_store("s3://runs/other"), print) == store.path_of(1)
    held = state(0)
    read_weights(best, held)
    assert bool((held["weight"] == 1).all())
    (store.folder / "best").write_bytes(b"../other/step-9\n")
    assert checkpoint_at(best) == place(best)


def test_a_copy_of_an_export_is_whole_when_its_digests_are_there(server, tmp_path, impatient):
    """What an earlier copy had is gone, and one that breaks off has no SHA256SUMS."""
    export, at = tmp_path / "export", place("s3://runs/a/export")
    write(export, {"w": 4}, lambda name: torch.ones(1), {"config.json": "{}"})
    (at / "model-00001-of-00002.safetensors").write_bytes(b"old")
    done = []
    copy_export(export, at, done.append)
    assert server.names("a/export/") == sorted(file.name for file in export.iterdir())
    assert all((at / file.name).read_bytes() == file.read_bytes() for file in export.iterdir())
    assert [line.split()[3] for line in done] == ["config.json", "model.safetensors", "SHA256SUMS"]

    def cut(what):
        if "model" in what:
            server.gate.shut()

    try:
        with pytest.raises(DiskError, match=r"model.safetensors cannot be written: the store cannot be reached"):
            copy_export(export, at, cut)
    finally:
        server.gate.open()
    assert server.names("a/export/") == ["config.json"]


def test_an_address_belongs_to_one_run(server, tmp_path):
    folder, mine, other = place("s3://runs/owned"), tmp_path / "a", tmp_path / "b"
    claim(folder, mine)
    claim(folder, mine)
    with pytest.raises(PlaitError, match="holds the checkpoints of the run in") as raised:
        claim(folder, other)
    assert raised.value.key == "checkpoint.dir"
    (folder / OWNER).unlink()
    check_owner(folder, other)


def test_a_store_that_goes_away_is_tried_again_and_then_ends_the_save(server, impatient, monkeypatch):
    """All of a save is repeated, with a line after a while; what a full disk does follows."""
    monkeypatch.setattr(objects, "QUIET", 0.0)
    store, said = open_store("s3://runs/away"), []
    saver = Saver(store, "async", say=said.append)
    saver.save(state(1), 1)
    saver.wait()
    make_room, waits = store.make_room, iter([False, True])

    def shut(step):
        make_room(step)
        server.gate.shut()

    monkeypatch.setattr(store, "make_room", shut)
    monkeypatch.setattr("plait.checkpoint.save.time.sleep", lambda seconds: next(waits, 0) and server.gate.open())
    monkeypatch.setattr(objects, "PATIENCE", 1e9)
    saver.save(state(2), 2)
    saver.wait()
    assert len(said) == 1, "once, however often it is tried"
    assert "cannot be reached" in said[0]
    assert "trying again" in said[0]
    assert [path.name for path in store.complete()] == ["step-1", "step-2"]
    monkeypatch.setattr(objects, "PATIENCE", 0.5)
    try:
        saver.save(state(3), 3)
        with pytest.raises(DiskError, match=r"step 3 could not be saved: s3://runs/away/step-3/.* cannot be reached"):
            saver.wait()
    finally:
        server.gate.open()
    assert store.latest() == store.path_of(2)


@pytest.mark.parametrize(
    ("address", "without", "why"),
    [
        ("s3://nobody/a", (), "there is no bucket 'nobody'"),
        ("s3://runs/a", ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "there are no credentials that fit; set AWS_"),
        ("zz://runs/a", (), "fsspec knows no zz://"),
    ],
)
def test_what_a_start_refuses(server, monkeypatch, address, without, why):
    from s3fs import S3FileSystem

    for name in without:
        monkeypatch.delenv(name)
    S3FileSystem.clear_instance_cache()
    with pytest.raises(DiskError) as raised:
        objects.Address(address).check(f"checkpoint.dir={address}:")
    assert str(raised.value).startswith(f"checkpoint.dir={address}: {why}")
    assert (raised.value.key, raised.value.value) == ("checkpoint.dir", address)
    S3FileSystem.clear_instance_cache()
