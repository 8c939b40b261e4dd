"""Copies of the state in memory: which are whole, which fit, and that ranks go on from one bitwise."""

import contextlib
import json
import os
import threading
from unittest import mock

import pytest
import torch.distributed as dist

from plait.checkpoint.copies import MemoryCopies
from plait.checkpoint.neighbour import serving
from plait.checkpoint.slot import BEGIN, Slot
from plait.contract.observer import RunObserver
from plait.host import check, compose
from plait.records.run_folder import RunFolder
from plait.system.held_memory import EACH, PLACES, held, of_this_machine
from plait.train.trainer import Trainer
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
    assert bytes(again.view(9000)) == b"plait" * 1800
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


def test_memory_is_the_launchers_alone_and_ends_with_it():
    with held(2):
        own, address = of_this_machine()
        assert (len(own), address) == (2 * EACH, None)
        Slot(own[0]).room(100)
        assert os.readlink(own[0]).startswith("/memfd:plait-copy-")  # it has no name in a folder
    assert of_this_machine() == ([], None)
    assert not os.path.exists(own[0])
    with held(0):
        assert of_this_machine() == ([], None)


class Killed(BaseException):
    """In the place of SIGKILL: nothing is saved."""


def run(node, folder, until=0, harm=None, machines=None):
    """(the step that a start goes on from, what it says, the rows), if the ranks are killed after step `until`.

    harm: (what happens to the memory, of which rank) before. machines: the number of each rank's, if each has its own.
    """
    rank = dist.get_rank()
    if machines:
        own = places = [folder / f"memory-{machines[rank]}-{number}" for number in range(2 * EACH)]
    else:
        places = [folder / f"memory-{number}" for number in range(EACH * dist.get_world_size())]
        own = places[EACH * rank : EACH * (rank + 1)]
    for place in own:
        place.touch()
    dist.barrier()
    if harm and harm[1] == rank:
        slots = sorted(map(Slot, own), key=lambda slot: (slot.notes() or {"step": 0})["step"])
        HARM[harm[0]](slots)
        if harm[0] == "disk":
            for manifest in (folder / "checkpoints").glob("*/manifest.json"):
                os.truncate(manifest, 5)
        if harm[0].endswith("newest on disk"):
            flip(next((folder / "checkpoints" / "step-6").glob("*.distcp")), 3000)

    def die(step: int) -> None:
        if step == until:
            trainer.checkpoints._copies.wait()
            raise Killed

    said: list[str] = []
    seen = whole_run.Rows(die)
    count = str(int(until == 0))
    env = {PLACES: ":".join(map(str, places)), "LOCAL_RANK": str(0 if machines else rank)}
    with (
        mock.patch.dict(os.environ, {**env, "TORCHELASTIC_RESTART_COUNT": count}),
        serving(places, "127.0.0.1") if machines else contextlib.nullcontext(),
    ):
        trainer = Trainer(node, RunFolder(folder), said.append, [seen])
        start = trainer.restore()
        with contextlib.suppress(Killed):
            trainer.fit()
        dist.barrier()
    return start, said, seen.rows


def order_of_rows_and_copies(node, folder):
    """What happened on this rank to the row of step 4 and the copy of step 2, whose checksums take long."""
    events, written = [], threading.Event()
    complete = MemoryCopies._complete

    def late(self, slot, size, notes):
        if notes["step"] == 2:
            written.wait(0.5)
        complete(self, slot, size, notes)
        events.append(("copy", notes["step"]))

    class Watch(RunObserver):
        def row(self, row):
            events.append(("row", row["step"]))
            if row["step"] == 4:
                written.set()

    places = [folder / f"memory-{number}" for number in range(EACH * dist.get_world_size())]
    for place in places:
        place.touch()
    dist.barrier()
    env = {PLACES: ":".join(map(str, places)), "LOCAL_RANK": str(dist.get_rank())}
    with mock.patch.dict(os.environ, env), mock.patch.object(MemoryCopies, "_complete", late):
        trainer = Trainer(node, RunFolder(folder), lambda line: None, [Watch()])
        trainer.restore()
        trainer.fit()
    return [event for event in events if event in (("row", 4), ("copy", 2))]


def test_who_sees_a_row_may_count_on_the_copy_before_it(plait_ranks, tmp_path):
    folder = started(tmp_path / "run")
    node = node_of(folder, FSDP, 2, "train.steps=5", "checkpoint.interval=0")
    assert plait_ranks.run(order_of_rows_and_copies, node, folder, world=2) == [[("copy", 2), ("row", 4)]] * 2


def spoil(slot):
    slot.view(slot.notes()["size"])[10] ^= 1


HARM = {  # to slots by step
    "lost": lambda slots: slots[-1].clear(),
    "damaged": lambda slots: spoil(slots[-1]),
    "none": lambda slots: [slot.clear() for slot in slots],
    "disk": lambda slots: None,
    "the newest and the newest on disk": lambda slots: spoil(slots[-1]),
    "both and the newest on disk": lambda slots: [spoil(slot) for slot in slots],
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
    "the older in memory is sound": (FSDP, 6, 6, ("the newest and the newest on disk", 1), 4),
    "the older on disk is sound": (FSDP, 3, 6, ("both and the newest on disk", 1), 3),
}


@pytest.fixture(scope="module")
def undisturbed():
    """Strategies -> the rows of a run that nobody kills."""
    return {}


QUICK = ("damaged",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES]
)
def test_ranks_go_on_from_the_newest_copy_that_all_have(case, plait_ranks, tmp_path, undisturbed):
    strategies, interval, until, harm, expected = CASES[case]
    node = node_of(tmp_path, strategies, 2, f"checkpoint.interval={interval}")
    if (key := json.dumps(strategies)) not in undisturbed:
        undisturbed[key] = plait_ranks.run(run, node, started(tmp_path / "whole"), world=2)[0][2]
    folder = started(tmp_path / "killed")
    none = "checkpoint: there is none to resume; all ranks start over at step 0"
    _, said, before = plait_ranks.run(run, node, folder, until, world=2)[0]
    assert none not in said, "nothing was asked to go on"
    start, said, after = plait_ranks.run(run, node, folder, 0, harm, world=2)[0]
    assert start == expected
    from_memory = case not in ("none on a rank", "the disk is newer", "the older on disk is sound")
    assert (f"checkpoint: resumed after step {expected} from memory" in said) == from_memory
    assert (none in said) == (case == "none on a rank")
    spoiled = any("rank 1's was changed after it was written" in line for line in said)
    assert spoiled == (case in ("damaged", "the older in memory is sound", "the older on disk is sound"))
    assert any("is sound: step-3:" in line for line in said) == (case == "the disk is damaged")
    assert whole_run.numbers([*before[:start], *after]) == whole_run.numbers(undisturbed[key])


@pytest.mark.slow
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


EXACT = [f"precision.{each}=float64" for each in ("param", "reduce", "storage")]
TENSOR = {"tensor_parallel": {"degree": 2}, "fsdp2": {}}
MOVES = {  # strategies and machines before and after, the step that the ranks go on from, whether from memory
    "a machine is lost": (FSDP, [0, 1], FSDP, [0], 4, True),
    "a machine comes back empty": (FSDP, [0, 1], FSDP, [0, 2], 4, True),
    "two that are not neighbours are lost": (FSDP, [0, 1, 2, 3], FSDP, [0, 2], 4, True),
    "neighbours are lost": (FSDP, [0, 1, 2, 3], FSDP, [0, 3], 3, False),
    "strided": (TENSOR, [0, 1, 2, 3], TENSOR, [0, 2], 4, True),
    "less divided": ({"tensor_parallel": {"degree": 2}}, [0, 1], {}, [0], 4, True),
    "stages": ({"pipeline": {"degree": 2}}, [0, 1], {"zero": {}}, [0, 2], 4, True),
    "more divided": (
        {"fsdp2": {"shard": 1, "replicate": 2}},
        [0, 1],
        {"tensor_parallel": {"degree": 2}},
        [0, 1],
        4,
        True,
    ),
    "workers apart": ({"local_sgd": {"every": 4}}, [0, 1], {"local_sgd": {"every": 4}}, [0], 3, False),
}
QUICK_MOVES = ("a machine is lost",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK_MOVES else [pytest.mark.slow]) for case in MOVES]
)
def test_machines_go_on_from_the_copies_that_are_left(case, plait_ranks, tmp_path, undisturbed):
    """Each machine has one rank, and the copy of the machine before."""
    before, machines, after, left, expected, from_memory = MOVES[case]
    folder, options = started(tmp_path / "killed"), ("checkpoint.interval=3", *EXACT)
    node = node_of(tmp_path, before, len(machines), *options)
    plait_ranks.run(run, node, folder, 5, machines=machines, world=len(machines))
    node = node_of(tmp_path, after, len(left), *options)
    start, said, rows = plait_ranks.run(run, node, folder, machines=left, world=len(left))[0]
    assert start == expected, said
    assert (f"checkpoint: resumed after step {expected} from memory" in said) == from_memory
    if "local_sgd" in before:
        return
    if "one" not in undisturbed:
        alone = node_of(tmp_path, {}, 1, *options)
        undisturbed["one"] = plait_ranks.run(run, alone, started(tmp_path / "one"), world=1)[0][2]
    assert [row["step"] for row in rows] == list(range(expected + 1, 10))
    for row, other in zip(rows, undisturbed["one"][expected:], strict=True):
        for key in ("loss", "grad_norm"):
            assert abs(row[key] - other[key]) <= 1e-9 * abs(other[key]), (row, other)
