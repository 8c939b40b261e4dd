"""Copies of the state in memory: which are whole, which fit, and that ranks go on from one bitwise."""

import contextlib
import json
import os
from unittest import mock

import pytest
import torch.distributed as dist

from plait.checkpoint.slot import BEGIN, Slot
from plait.host import check, compose
from plait.system.held_memory import EACH, PLACES, held, of_this_rank
from plait_testing import whole_run

NOTES = {"step": 7}


@pytest.fixture
def slot(tmp_path):
    path = tmp_path / "slot"
    path.touch()
    slot = Slot(path)
    slot.room(9000)[:] = b"plait" * 1800
    return slot


def test_a_copy_counts_once_it_is_complete(slot, tmp_path):
    assert slot.notes() is None
    slot.complete(9000, NOTES)
    again = Slot(tmp_path / "slot")  # another process
    assert again.notes() == {**NOTES, "size": 9000, "crcs": again.notes()["crcs"]}
    assert bytes(again.bytes(9000)) == b"plait" * 1800
    assert again.is_sound()
    slot.room(20)  # the next one is being written
    assert again.notes() is None
    assert not again.is_sound()


@pytest.mark.parametrize("place", [0, 8, 24, BEGIN + 9000, "end"])  # name, size and CRC in the mark; the notes
def test_damage_beside_the_bytes(place, slot, tmp_path):
    slot.complete(9000, NOTES)
    path = tmp_path / "slot"
    if place == "end":
        os.truncate(path, path.stat().st_size - 1)
    else:
        flip(path, place)
    assert Slot(path).notes() is None


@pytest.mark.parametrize("place", [BEGIN, BEGIN + 8999])
def test_damage_of_the_bytes(place, slot, tmp_path):
    slot.complete(9000, NOTES)
    flip(tmp_path / "slot", place)
    assert Slot(tmp_path / "slot").notes() is not None
    assert not Slot(tmp_path / "slot").is_sound()


def flip(path, place):
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def test_memory_is_the_launchers_alone_and_ends_with_it(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with held(2):
        own, all_ = of_this_rank(), os.environ[PLACES].split(":")
        assert own == all_[EACH:]
        assert len(all_) == 2 * EACH
        Slot(own[0]).room(100)
        assert os.readlink(own[0]).startswith("/memfd:plait-copy-")  # it has no name in a folder
    assert of_this_rank() == []
    assert not os.path.exists(own[0])
    with held(0):
        assert of_this_rank() == []


class Killed(BaseException):
    """In the place of SIGKILL: nothing is saved."""


def run(node, folder, until=0, harm=None):
    """(the step that a start goes on from, what it says, the rows), if the ranks are killed after step `until`.

    harm: (what happens to the memory, of which rank) before.
    """
    from plait.records.run_folder import RunFolder
    from plait.train.trainer import Trainer

    rank = dist.get_rank()
    places = [folder / f"memory-{rank}-{number}" for number in range(EACH)]
    for place in places:
        place.touch()
    if harm and harm[1] == rank:
        slots = sorted(map(Slot, places), key=lambda slot: (slot.notes() or {"step": 0})["step"])
        HARM[harm[0]](slots)
        if harm[0] == "disk":
            for manifest in (folder / "checkpoints").glob("*/manifest.json"):
                os.truncate(manifest, 5)

    def die(step: int) -> None:
        if step == until:
            trainer.checkpoints._copies.wait()
            raise Killed

    said: list[str] = []
    seen = whole_run.Rows(die)
    count = str(int(harm is not None))
    env = {PLACES: ":".join(map(str, places)), "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": count}
    with mock.patch.dict(os.environ, env):
        trainer = Trainer(node, RunFolder(folder), said.append, [seen])
        start = trainer.restore()
    with contextlib.suppress(Killed):
        trainer.fit()
    return start, said, seen.rows


def spoil(slot):
    slot.bytes(slot.notes()["size"])[10] ^= 1


HARM = {  # to slots by step
    "lost": lambda slots: slots[-1].clear(),
    "damaged": lambda slots: spoil(slots[-1]),
    "none": lambda slots: [slot.clear() for slot in slots],
    "disk": lambda slots: None,
}


def node_of(folder, strategies, world, *more):
    small = ("train.steps=9", "validation.interval=0", "checkpoint.memory_steps=2", "checkpoint.mode=sync")
    return check(compose(whole_run.overrides(strategies, folder, world, *small, *more)), world).config


def started(folder):
    folder.mkdir()
    (folder / "versions.json").write_text("{}")
    return folder


FSDP = {"fsdp2": {}}
CASES = {  # strategies, steps between checkpoints on disk, killed after, harm, the step that the ranks go on from
    "fsdp2": (FSDP, 7, 5, None, 4),
    "pipeline": ({"pipeline": {"degree": 2}}, 7, 5, None, 4),
    "zero": ({"zero": {}}, 7, 5, None, 4),
    "workers apart": ({"local_sgd": {"every": 4}}, 7, 6, None, 6),
    "being written": (FSDP, 7, 5, ("lost", 1), 2),
    "damaged": (FSDP, 7, 5, ("damaged", 1), 2),
    "none on a rank": (FSDP, 7, 5, ("none", 0), 0),
    "the disk is newer": (FSDP, 5, 6, ("lost", 0), 5),
    "memory is newer than the disk": (FSDP, 5, 7, None, 6),
    "the disk is damaged": (FSDP, 3, 5, ("disk", 0), 4),
}


@pytest.fixture(scope="module")
def undisturbed():
    """Strategies -> the rows of a run that nobody kills."""
    return {}


QUICK = ("fsdp2", "damaged", "the disk is damaged")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES]
)
def test_ranks_go_on_from_the_newest_copy_that_all_have(case, plait_ranks, tmp_path, undisturbed):
    strategies, interval, until, harm, expected = CASES[case]
    node = node_of(tmp_path, strategies, 2, f"checkpoint.interval={interval}")
    if (key := json.dumps(strategies)) not in undisturbed:
        undisturbed[key] = plait_ranks.run(run, node, started(tmp_path / "whole"), world=2)[0][2]
    folder = started(tmp_path / "killed")
    before = plait_ranks.run(run, node, folder, until, world=2)[0][2]
    start, said, after = plait_ranks.run(run, node, folder, 0, harm, world=2)[0]
    assert start == expected
    from_memory = case not in ("none on a rank", "the disk is newer")
    assert (f"checkpoint: resumed after step {expected} from memory" in said) == from_memory
    none = "checkpoint: there is none to resume; all ranks start over at step 0"
    assert (none in said) == (case == "none on a rank")
    assert any("rank 1's was changed after it was written" in line for line in said) == (case == "damaged")
    assert any("is sound: step-3:" in line for line in said) == (case == "the disk is damaged")
    assert whole_run.numbers([*before[:start], *after]) == whole_run.numbers(undisturbed[key])


def test_a_stream_goes_on_from_its_place(plait_ranks, tmp_path):
    text = whole_run.overrides(FSDP, tmp_path, 2, "train.steps=9", "validation.interval=0", "checkpoint.mode=sync")
    own = [each for each in text if not each.startswith("data")]
    stream = ["data=hf", "data.name=json", f"data.data_files={tmp_path / 'text.jsonl'}", "data.validation_documents=0"]
    copies = ["data.shuffle_buffer=5", "checkpoint.memory_steps=2", "checkpoint.interval=7"]
    node = check(compose([*own, *stream, *copies]), 2).config
    whole = plait_ranks.run(run, node, started(tmp_path / "whole"), world=2)[0][2]
    folder = started(tmp_path / "killed")
    before = plait_ranks.run(run, node, folder, 5, world=2)[0][2]
    start, said, after = plait_ranks.run(run, node, folder, world=2)[0]
    assert (start, said[-1]) == (4, "checkpoint: resumed after step 4 from memory")
    assert whole_run.numbers([*before[:4], *after]) == whole_run.numbers(whole)


def test_another_layout_goes_on_from_the_disk(plait_ranks, tmp_path):
    """Of as many ranks, each with a part of the same form."""
    folder, every = started(tmp_path / "killed"), "checkpoint.interval=3"
    one = {"fsdp2": {"shard": 1, "replicate": 2}}
    plait_ranks.run(run, node_of(tmp_path, one, 2, every), folder, 5, world=2)
    other = {"ddp": {}}
    start, said, _ = plait_ranks.run(run, node_of(tmp_path, other, 2, every), folder, world=2)[0]
    assert (start, [line for line in said if "from memory" in line]) == (3, [])
