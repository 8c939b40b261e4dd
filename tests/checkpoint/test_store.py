"""Folders of checkpoints: what counts as complete, what as sound, and what a kill leaves. No torch here."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from plait.checkpoint.best import name_best
from plait.checkpoint.files import digest
from plait.checkpoint.pieces import dumps
from plait.checkpoint.store import MANIFEST, Manifest, NoneSound, Store
from plait.contract.errors import PlaitError

PARAMETERS = {"embed.weight": ((8, 4), "float32"), "head.weight": ((8, 4), "float32")}


def put(store: Store, step: int, content: bytes = b"") -> Path:
    whole = store.temporary(step)
    whole.mkdir(parents=True)
    files = {}
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        (whole / name).write_bytes(content or f"{step} {name} ".encode() * 50)
        files[name] = ((whole / name).stat().st_size, digest(whole / name))
    return store.commit(
        whole, Manifest(step, tokens=step * 10, data={"docs": {7: 1}}, parameters=PARAMETERS, files=files)
    )


def test_a_manifest_survives_the_disk(tmp_path: Path) -> None:
    path = put(Store(tmp_path), 3)
    read = Store.read(path)
    assert (read.step, read.tokens, read.data) == (3, 30, {"docs": {"7": 1}})
    assert set(read.files) == {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    assert Store.verify(path) is None


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (100, 9, 20):
        put(store, step)
    (tmp_path / "step-300.tmp").mkdir()
    (tmp_path / "step-x").mkdir()
    assert [p.name for p in store.complete()] == ["step-9", "step-20", "step-100"]
    assert store.latest() == tmp_path / "step-100"


def test_nothing_there(tmp_path: Path) -> None:
    store = Store(tmp_path / "none")
    assert store.latest() is None
    assert store.complete() == []
    store.clean()
    store.prune(1)


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def shift_step(path: Path) -> None:
    """Still valid JSON, still the right size: only the manifest's digest of itself tells."""
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace('"tokens": 20', '"tokens": 30'))


def of_a_later_plait(path: Path) -> None:
    body = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**body, "format": 3}))


HIDDEN = {
    "flipped byte": (lambda p: flip(p / "__1_0.distcp", 17), r"__1_0\.distcp was changed"),
    "flipped byte of the metadata": (lambda p: flip(p / ".metadata", 5), r"\.metadata was changed"),
}
DAMAGES = {
    "truncated": (lambda p: (p / "__0_0.distcp").write_bytes(b"short"), r"__0_0\.distcp has 5 bytes instead of \d+"),
    "missing file": (lambda p: (p / "__0_0.distcp").unlink(), r"__0_0\.distcp is missing"),
    "missing manifest": (lambda p: (p / MANIFEST).unlink(), "not written completely"),
    "torn manifest": (lambda p: (p / MANIFEST).write_text('{"step": 2, '), "is broken"),
    "not text": (lambda p: (p / MANIFEST).write_bytes(b"\xff\xfe\x00"), "is broken"),
    "other manifest": (shift_step, "was changed"),
    "later format": (of_a_later_plait, "format is 3"),
}


@pytest.mark.parametrize("damage", HIDDEN | DAMAGES)
def test_a_damaged_one_is_named_and_skipped(tmp_path: Path, damage: str) -> None:
    """At once, or when somebody has read it."""
    store, said = Store(tmp_path), []
    sound, damaged = put(store, 1), put(store, 2)
    do, why = (HIDDEN | DAMAGES)[damage]
    do(damaged)
    found = Store.verify(damaged) or ""
    assert re.search(why, found)
    if damage in HIDDEN:
        assert store.latest(pytest.fail) == damaged
        assert store.complete() == [sound, damaged]
        store.damaged[damaged] = found
    assert store.latest(said.append) == sound
    assert said == [f"skipping the checkpoint {damaged}: {found}"]
    assert store.latest(pytest.fail) == sound  # it is said once
    assert store.complete() == [sound]
    put(store, 2)
    assert store.latest(pytest.fail) == damaged
    assert store.complete() == [sound, damaged]


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    original = (put(Store(tmp_path), 1) / MANIFEST).read_bytes()
    manifest, missed = Manifest.loads(original), []
    for at in range(len(original)):
        flipped = bytearray(original)
        flipped[at] ^= 1
        with contextlib.suppress(ValueError):
            if Manifest.loads(bytes(flipped)) != manifest:
                missed.append(at)
    assert missed == []


def test_prune_keeps_the_last_ones(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (1, 2, 3):
        put(store, step)
    store.prune(2)
    assert [p.name for p in store.complete()] == ["step-2", "step-3"]
    store.prune(0)
    assert [p.name for p in store.complete()] == ["step-3"]


def test_the_best_is_kept_beside_the_last_ones_and_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for best, step, kept in ((1, 1, [1]), (1, 2, [1, 2]), (1, 3, [1, 3]), (4, 4, [4])):
        put(store, step)
        name_best(store, best)
        store.prune(1, newest=step, best=best)
        assert store.complete() == [store.path_of(each) for each in kept]
        assert (tmp_path / "best").resolve() == store.path_of(best).resolve()
        assert store.latest(lambda _: None) == store.path_of(step)


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (40, 80):
        put(store, step)
    cut(tmp_path / "step-80" / ".metadata")
    put(store, 60)
    store.prune(1, newest=60)
    assert store.latest(lambda _: None) == tmp_path / "step-60"


def test_damaged_ones_do_not_push_out_sound_ones(tmp_path: Path) -> None:
    """Steps 35 and 40 are damaged; at another interval the next saves are of steps 37 and 44."""
    store = Store(tmp_path)
    for step in (25, 30, 35, 40):
        put(store, step)
    cut(store.path_of(35) / ".metadata")
    store.damaged[store.path_of(40)] = "its tensors were changed"
    assert store.latest(lambda _: None) == store.path_of(30)
    put(store, 37)
    store.prune(2, newest=37)
    assert store.complete() == [store.path_of(30), store.path_of(37)]
    put(store, 44)
    store.prune(2, newest=44)
    assert store.complete() == [store.path_of(37), store.path_of(44)]
    assert store.path_of(35).exists()
    put(store, 40)
    assert store.latest(pytest.fail) == store.path_of(44)
    assert store.path_of(40) in store.complete()


def test_none_sound_is_not_none_there(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (1, 2):
        cut(put(store, step) / "__0_0.distcp")
    with pytest.raises(
        NoneSound, match=rf"^no checkpoint in {tmp_path} is sound: step-2: its file .*; step-1: its file "
    ):
        store.latest(pytest.fail)
    store.prune(1)
    store.clean()
    assert len(store.found()) == 2


def test_what_is_no_checkpoint_of_its_step_is_neither_pruned_nor_replaced(tmp_path: Path) -> None:
    store, said = Store(tmp_path), []
    for step in (1, 2, 3):
        put(store, step)
    shutil.copytree(store.path_of(1), store.path_of(9))
    shutil.copytree(store.path_of(2), tmp_path / "step-002")
    store.path_of(8).write_text("a file")
    assert store.latest(said.append) == store.path_of(3)
    assert said == [
        f"skipping the checkpoint {store.path_of(9)}: it is the checkpoint of step 1, copied or renamed",
        f"skipping the checkpoint {store.path_of(8)}: it is not a folder",
    ]
    store.prune(1)
    assert {p.name for p in tmp_path.iterdir()} == {"step-3", "step-9", "step-002", "step-8"}
    for _ in range(2):
        assert Store.verify(put(store, 9)) is None
        assert Store.verify(put(store, 8)) is None
        assert (tmp_path / "step-8.kept-1").read_text() == "a file"
        assert Store.read(tmp_path / "step-9.kept-1").step == 1
    shutil.rmtree(store.path_of(9))
    shutil.copytree(store.path_of(3), store.path_of(9))
    put(store, 9)
    assert Store.read(tmp_path / "step-9.kept-2").step == 3
    store.clean()
    assert len(list(tmp_path.glob("*.kept-*"))) == 3
    assert [path.name for path in store.complete()] == ["step-3", "step-8", "step-9"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, 5, b"old")
    put(store, 5, b"new")
    assert (store.latest() / ".metadata").read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["step-5"]


def test_verify_reads_every_file_of_every_piece(tmp_path: Path) -> None:
    store = Store(tmp_path)
    whole = store.temporary(1)
    whole.mkdir()
    content = b"one" + b"two" * 50
    files: dict[str, tuple[int, str | None]] = {}
    (whole / "a").write_bytes(content)
    (whole / "a.pieces").write_text(dumps([(len(part), zlib.crc32(part)) for part in (content[:3], content[3:])]))
    files["a"] = (len(content), None)
    files["a.pieces"] = ((whole / "a.pieces").stat().st_size, digest(whole / "a.pieces"))
    path = store.commit(whole, Manifest(1, files=files))
    assert Store.verify(path) is None
    for name in files:
        for at in range((path / name).stat().st_size):
            flip(path / name, at)
            assert Store.quick_problem(path) is None
            assert "was changed after it was written (" in (Store.verify(path) or "")
            flip(path / name, at)


def test_clean_finishes_what_lacked_only_its_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, 1).rename(tmp_path / "step-1.tmp")
    put(store, 2).rename(tmp_path / "step-2.tmp")
    flip(tmp_path / "step-2.tmp" / ".metadata", 0)
    put(store, 3).rename(tmp_path / "step-3.old")
    store.clean()
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_clean_takes_what_is_sound_in_place_of_what_is_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    shutil.copytree(put(store, 1), tmp_path / "step-1.tmp")
    flip(store.path_of(1) / ".metadata", 0)
    put(store, 3).rename(tmp_path / "step-4.tmp")
    store.clean()
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    assert store.latest(pytest.fail) == store.path_of(1)


def test_clean_brings_back_the_one_that_was_being_replaced(tmp_path: Path) -> None:
    """If nothing else is left, because the disk lost its successor."""
    store = Store(tmp_path)
    for step in (4, 5, 6):
        put(store, step).rename(tmp_path / f"step-{step}.old")
    flip(tmp_path / "step-6.old" / ".metadata", 0)
    store.clean()
    assert [p.name for p in tmp_path.iterdir()] == ["step-5"]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"embed.weight": (8, 4)}, "it has 'head.weight', which this run's model does not have"),
        ({"embed.weight": (8, 4), "head.weigth": (8, 4)}, "lacks 'head.weigth'; did you mean 'head.weight'"),
        ({"embed.weight": (8, 5), "head.weight": (8, 4)}, r"'embed.weight' has shape \(8, 4\) there and \(8, 5\)"),
    ],
)
def test_another_model(tmp_path: Path, parameters: dict[str, tuple[int, ...]], message: str) -> None:
    manifest = Store.read(put(Store(tmp_path), 1))
    Store.check_model(manifest, {name: shape for name, (shape, _) in PARAMETERS.items()})
    with pytest.raises(PlaitError, match=f"step 1 is of another model.*{message}"):
        Store.check_model(manifest, parameters)


def test_read_says_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=f"{tmp_path} is not a checkpoint"):
        Store.read(tmp_path)
    (tmp_path / MANIFEST).write_bytes(b"\xff")
    with pytest.raises(PlaitError, match="cannot be used"):
        Store.read(tmp_path)


# A child is killed before its n-th change of the disk, for every n until one lives to the end. It saves steps 1 to 3,
# keeps one, and saves step 3 a second time, so every kill lies in a save, a removal or a replacement.
KILLED = """
import os, sys
from pathlib import Path
from plait.checkpoint.files import digest
from plait.checkpoint.store import Manifest, Store

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "open"}

def save(store, step):
    whole = store.temporary(step)
    whole.mkdir(parents=True, exist_ok=True)
    for name in ("a", "b"):
        (whole / name).write_bytes(os.urandom(64))
    files = {name: (64, digest(whole / name)) for name in ("a", "b")}
    store.commit(whole, Manifest(step, files=files))
    store.prune(1, newest=step)

def child(folder, fatal):
    store, changes, saved = Store(folder), [0], os.open(folder + ".saved", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    def hook(event, arguments):
        if event in CHANGES and (event != "open" or arguments[1] == "w" or arguments[1] == "wb"):
            changes[0] += 1
            if changes[0] == fatal:
                os._exit(9)
    sys.addaudithook(hook)
    store.clean()
    for step in (1, 2, 3, 3):
        save(store, step)
        os.pwrite(saved, str(step).encode(), 0)
    os._exit(0)

kills, status = 0, 9
while status == 9:
    kills += 1
    folder = f"{sys.argv[1]}/{kills}"
    os.mkdir(folder)
    if not os.fork():
        child(folder, kills)
    status = os.waitstatus_to_exitcode(os.wait()[1])
    assert status in (0, 9), status
    saved = int(Path(folder + ".saved").read_text() or 0)
    store, said = Store(folder), []
    store.clean()
    newest = store.latest(said.append)
    assert not said, (kills, said)
    assert (newest is not None) or saved == 0, (kills, saved)
    assert newest is None or int(newest.name[5:]) >= saved, (kills, saved, newest)
    assert all(store.verify(p) is None for p in Path(folder).iterdir()), kills
    save(store, 4)
    assert store.latest(said.append).name == "step-4" and not said
print(kills)
"""


def test_a_kill_before_any_change_of_the_disk_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 30
