"""Streams: shares that do not overlap, packing on the way, and resuming to the bit."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from plait import PlaitError
from plait.data.ahead import Ahead
from plait.data.parts import InParts
from plait.testing import raises_about
from plait_data import stream as stream_module
from plait_data.hf import Hf
from plait_data.place_kept import check_place_kept
from plait_data.prefetch import Prefetched
from plait_data.stream import StreamBatches

T, G = 16, 4
FILES, ROWS = 3, 40


@pytest.fixture(autouse=True)
def _read_little_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are so small that reading ahead goes through many epochs, which takes long."""
    monkeypatch.setattr(stream_module, "DEPTH", 8)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """120 documents in three files; document i of file f starts with `<f.i `."""
    paths = []
    for file in range(FILES):
        path = tmp_path / f"part-{file}.jsonl"
        rows = [{"text": f"<{file}.{i} " + "words " * ((i * 5 + file) % 11)} for i in range(ROWS)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(str(path))
    return paths


def opened(files: list[str], dp: tuple[int, int] = (0, 1), seed: int = 0, **options: object) -> StreamBatches:
    options = {"name": "json", "data_files": files, "shuffle_buffer": 7, "validation_documents": 5, **options}
    return Hf(**options).open(seq_len=T, seed=seed, global_batch_size=G, dp=dp)


def tokens(stream: StreamBatches, steps: int, start: int = 0) -> list[int]:
    """The stream of tokens out of which the batches of these steps were cut."""
    batches = [stream.train(step) for step in range(start, start + steps)]
    joined = [token for batch in batches for token in batch.tokens.flatten().tolist()]
    return [*joined, int(batches[-1].labels[-1, -1])]


def documents(stream: StreamBatches, steps: int) -> list[str]:
    """The names of the documents in these batches, the last of which may be cut and is left out."""
    texts = "".join(chr(token) if token < 256 else "\0" for token in tokens(stream, steps)).split("\0")[:-1]
    return [text.split()[0] for text in texts]


def size(files: list[str], held: int = 5) -> tuple[int, set[str]]:
    """Tokens of an epoch, and the names of the documents held out."""
    rows = [json.loads(line)["text"] for path in files for line in Path(path).read_text().splitlines()]
    return sum(len(text) + 1 for text in rows[held:]), {text.split()[0] for text in rows[:held]}


def test_an_epoch_gives_every_document_once_but_those_held_out(files: list[str]) -> None:
    length, held = size(files)
    steps = 2 * length // (G * T)
    given = documents(opened(files), steps)
    number = FILES * ROWS - len(held)
    first, second = given[:number], given[number : 2 * number - 3]
    assert len(set(first)) == number
    assert not set(first) & held
    assert set(second) <= set(first)
    assert max(Counter(second).values()) == 1
    assert first[: len(second)] != second
    assert documents(opened(files, seed=1), steps) != given


def test_the_order_of_the_files_depends_on_the_seed(files: list[str]) -> None:
    """Documents are not shuffled here, so the first one shows which file is read first."""
    first = {documents(opened(files, seed=seed, shuffle_buffer=1), 1)[0].partition(".")[0] for seed in range(8)}
    assert len(first) > 1


def test_samples_follow_on_each_other(files: list[str]) -> None:
    batch = opened(files).train(0)
    assert batch.tokens.shape == batch.labels.shape == (G, T)
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert torch.equal(batch.tokens.flatten()[1:], batch.labels.flatten()[:-1])
    assert batch.positions is None
    within = opened(files, attention="document").train(0)
    assert torch.equal(within.tokens, batch.tokens)
    ends = batch.tokens == 256
    assert torch.equal(within.labels == -100, ends)
    assert (within.positions[:, 1:][ends[:, :-1]] == 0).all()


def test_without_shuffling_the_order_is_the_streams(files: list[str]) -> None:
    given = documents(opened(files[:1], shuffle_buffer=1, validation_documents=0), 8)
    assert given == [f"<0.{i}" for i in range(len(given))]


def test_blocks_and_epochs_are_shuffled_each_in_its_own_way(files: list[str]) -> None:
    """Within a file, documents of a block keep together; blocks, and the order of files, differ."""
    blocks = documents(opened(files[:1], shuffle_buffer=8, validation_documents=0), 20)[:24]
    orders = [[int(name.split(".")[1]) - start for name in blocks[start : start + 8]] for start in (0, 8, 16)]
    assert [sorted(order) for order in orders] == [list(range(8))] * 3
    assert len(set(map(tuple, orders))) == 3
    length, _ = size(files, held=0)
    plain = documents(opened(files, shuffle_buffer=1, validation_documents=0), 4 * length // (G * T))
    number = FILES * ROWS
    epochs = [plain[at : at + number] for at in range(0, 3 * number, number)]
    assert len({tuple(name[1] for name in epoch) for epoch in epochs}) > 1


@pytest.mark.parametrize("count", [2, 3])  # of three files: by rows, and by files
def test_shares_do_not_overlap(files: list[str], count: int) -> None:
    source = Hf(name="json", data_files=files, shuffle_buffer=7, validation_documents=0)
    length, _ = size(files, held=0)
    given: list[str] = []
    for index in range(count):
        stream = source.open(seq_len=T, seed=0, global_batch_size=count, dp=(index, count))
        given += documents(stream, length * 7 // 10 // count // T)
    assert max(Counter(given).values()) == 1
    assert len(given) > FILES * ROWS * 0.6


@pytest.mark.parametrize("dp", [(1, 2), *(pytest.param(dp, marks=pytest.mark.slow) for dp in ((0, 1), (0, 4)))])
@pytest.mark.parametrize("attention", ["across", pytest.param("document", marks=pytest.mark.slow)])
def test_a_resumed_stream_gives_the_same_bits(files: list[str], dp: tuple[int, int], attention: str) -> None:
    """At the start, in the second epoch and in the third, and on from what was resumed itself."""
    steps = 2 * size(files)[0] // (G * T) + 3
    straight = opened(files, dp, attention=attention)
    states, batches = [], []
    for step in range(steps):
        states.append(json.dumps(straight.state_dict()))
        batches.append(straight.train(step))
    for step in (0, 1, steps // 2, steps - 4):
        resumed = opened(files, dp, attention=attention)
        resumed.load_state_dict(json.loads(states[step]))
        assert resumed.state_dict() == json.loads(states[step])
        for at in (step, step + 1):
            batch = resumed.train(at)
            assert torch.equal(batch.tokens, batches[at].tokens)
            assert torch.equal(batch.labels, batches[at].labels)
            if attention == "document":
                assert torch.equal(batch.positions, batches[at].positions)
        again = opened(files, dp, attention=attention)
        again.load_state_dict(resumed.state_dict())
        assert torch.equal(again.train(step + 2).tokens, batches[step + 2].tokens)


def test_a_resumed_stream_with_documents_longer_than_a_batch(tmp_path: Path) -> None:
    rows = [f"<{i} " + "long " * 100 for i in range(6)]
    path = tmp_path / "long.parquet"
    parquet.write_table(pa.table({"text": rows}), path)
    options = {"name": "parquet", "shuffle_buffer": 2, "validation_documents": 1}
    straight = opened([str(path)], **options)
    for step in range(70):
        state = straight.state_dict()
        batch = straight.train(step)
        if step in (5, 41, 65):  # an epoch has 39 steps
            resumed = opened([str(path)], **options)
            resumed.load_state_dict(state)
            assert torch.equal(resumed.train(step).tokens, batch.tokens)


def test_the_state_is_small_and_loads_in_place(files: list[str]) -> None:
    stream = opened(files)
    state = stream.state_dict()
    first = [stream.train(step).tokens for step in range(5)]
    assert len(json.dumps(stream.state_dict())) < 2000
    stream.load_state_dict(state)
    assert all(torch.equal(stream.train(step).tokens, first[step]) for step in range(5))


@pytest.mark.parametrize(
    ("parts", "attention"), [(2, "across"), *(pytest.param(n, "document", marks=pytest.mark.slow) for n in (1, 3, 4))]
)
def test_any_number_of_data_ranks_takes_the_same_batches(files: list[str], parts: int, attention: str) -> None:
    """Each begins where others stopped: inside of documents and of blocks, and in a later epoch."""

    def of_ranks(count: int) -> list[InParts]:
        return [
            InParts(
                lambda part: source.open(seq_len=T, seed=0, global_batch_size=12, dp=part), parts, T, 12, (i, count)
            )
            for i in range(count)
        ]

    options = {"shuffle_buffer": 7, "validation_documents": 5, "attention": attention}
    source = Hf(name="json", data_files=files[:1], **options)
    alone = [source.open(seq_len=T, seed=0, global_batch_size=12, dp=(part, parts)) for part in range(parts)]
    state: dict[str, dict] = {}
    for count, steps in ((3, range(2)), (1, range(2, 3)), (4, range(3, 6)), (2, range(6, 10))):
        ranks = of_ranks(count)
        for rank in ranks:
            if state:
                rank.load_state_dict(json.loads(json.dumps(state)))
        for step in steps:
            given, expected = ([each.train(step) for each in those] for those in (ranks, alone))
            for name in ("tokens", "labels", *(["positions"] if attention == "document" else [])):
                joined = [torch.cat([getattr(batch, name) for batch in batches]) for batches in (given, expected)]
                assert torch.equal(*joined), (step, count)
        state = {part: place for rank in ranks for part, place in rank.state_dict().items()}
    assert all(place["start"]["epoch"] > 0 for place in state.values())
    held = [torch.cat([each.validation(1).tokens for each in those]) for those in (ranks, alone)]
    assert torch.equal(*held)


def test_another_number_of_parts_is_refused_in_one_sentence(files: list[str]) -> None:
    state = opened(files, (1, 2)).state_dict()
    with pytest.raises(PlaitError, match=r"^a stream resumes only in as many parts .*: 2 then, 4 now$"):
        opened(files, (1, 4)).load_state_dict(state)
    with pytest.raises(ValueError, match="part 1, not of part 0"):
        opened(files, (0, 2)).load_state_dict(state)
    parts = InParts(lambda part: opened(files, part), 2, T, G, (0, 1))
    for number in (1, 4):
        with raises_about("train.data_parts", 2):
            parts.load_state_dict({str(part): state for part in range(number)})
    with raises_about("train.global_batch_size", G, "a multiple of 3"):
        InParts(lambda part: opened(files, part), 3, T, G, (0, 1))


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"shuffle_buffer": 8}, {"validation_documents": 6}, {"data_files": []}]
)
def test_other_data_is_refused(files: list[str], change: dict) -> None:
    state = opened(files).state_dict()
    other = {"files": files, **change}
    other["files"] = other.pop("data_files", files)
    with pytest.raises(PlaitError, match=r"a stream resumes only with (train\.seed=0|the same data options)"):
        opened(**other).load_state_dict(state)


@pytest.mark.parametrize(
    "change", [{"share": None}, {"share": [0]}, {"start": 3}, {"start": {"no such": 1}}, {"source": None, "seed": []}]
)
def test_a_state_that_no_stream_wrote_is_refused(files: list[str], change: dict) -> None:
    stream = opened(files)
    with pytest.raises(PlaitError, match=r"a stream resumes only with|stream is not one that Plait writes"):
        stream.load_state_dict({**stream.state_dict(), **change})


def test_batches_come_in_order(files: list[str]) -> None:
    stream = opened(files)
    with pytest.raises(ValueError, match="number 0 comes next, not 12"):
        stream.train(3)


def test_validation_is_the_same_for_all_and_wraps_round(files: list[str]) -> None:
    alone = opened(files)
    samples = torch.cat([alone.validation(index).tokens for index in range(12)])
    for count in (2, 4):
        shares = [opened(files, (index, count)) for index in range(count)]
        joined = [torch.cat([share.validation(index).tokens for share in shares]) for index in range(12)]
        assert torch.equal(torch.cat(joined), samples)
    text = "".join(json.loads(line)["text"] + "\0" for line in Path(files[0]).read_text().splitlines()[:5])
    number = (len(text) - 1) // T
    assert 1 < number < 12 * G
    expected = [[256 if c == "\0" else ord(c) for c in text[at * T : at * T + T]] for at in range(number)]
    assert samples.tolist() == (expected * (12 * G // number + 1))[: 12 * G]
    late = opened(files)
    assert torch.equal(late.validation(7).tokens, alone.validation(7).tokens)


def test_validation_out_of_a_split_of_its_own(files: list[str]) -> None:
    options = {"validation_split": "held", "shuffle_buffer": 1}
    stream = opened({"train": files[:1], "held": files[2:]}, **options)
    start = "".join(map(chr, stream.validation(0).tokens[0].tolist()))
    assert start.startswith("<2.0 ")
    assert documents(stream, 3)[0] == "<0.0"


def test_validation_needs_something_held_out(files: list[str]) -> None:
    with raises_about("data.validation_split"):
        opened(files, validation_documents=0).validation(0)
    with raises_about("data.validation_documents", 1, "more"):
        opened(files, validation_documents=1).validation(0)


def test_a_stream_that_is_held_out_whole_is_refused(files: list[str]) -> None:
    with raises_about("data.name", "json"):
        opened(files, validation_documents=1000).train(0)


def test_reading_ahead_forwards_items_errors_and_the_end() -> None:
    def failing() -> Iterator[int]:
        yield from range(5)
        raise PlaitError("the sixth is broken")

    assert list(Prefetched(iter(range(1000)), 3)) == list(range(1000))
    ahead = Prefetched(failing(), 2)
    assert [next(ahead) for _ in range(5)] == list(range(5))
    for _ in range(2):
        with pytest.raises(PlaitError, match="the sixth is broken"):
            next(ahead)


def test_reading_ahead_is_bounded_and_ends_with_its_reader() -> None:
    read = []

    def endless() -> Iterator[int]:
        while True:
            read.append(len(read))
            yield read[-1]

    ahead = Prefetched(endless(), 10)
    next(ahead)
    time.sleep(0.3)
    assert len(read) <= 12
    before = [thread for thread in threading.enumerate() if thread.name == "plait-data"]
    del ahead
    deadline = time.monotonic() + 5
    while any(thread.is_alive() for thread in before):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_state_tells_how_many_epochs_were_read(files: list[str]) -> None:
    stream, steps = opened(files[:1], validation_documents=0), 40
    epochs = []
    for step in range(steps):
        stream.train(step)
        epochs.append(stream.state_dict()["start"]["epoch"])
    assert epochs == sorted(epochs)
    assert {0, 1} <= set(epochs)


def test_a_library_that_loses_its_place_is_refused(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """datasets 5.0.0: the state of a stream that was resumed stays that of its start."""
    import datasets

    source = Hf(name="json", data_files=files)
    source.prepare(print)  # the installed one keeps it

    load, state = datasets.IterableDataset.load_state_dict, datasets.IterableDataset.state_dict

    def loaded(self: datasets.IterableDataset, given: dict[str, object]) -> None:
        self.was_resumed = True
        load(self, given)

    def stale(self: datasets.IterableDataset) -> object:
        return zeroed(state(self)) if hasattr(self, "was_resumed") else state(self)

    def zeroed(value: object) -> object:
        return {key: zeroed(one) for key, one in value.items()} if isinstance(value, dict) else value and 0

    monkeypatch.setattr(datasets.IterableDataset, "load_state_dict", loaded)
    monkeypatch.setattr(datasets.IterableDataset, "state_dict", stale)
    check_place_kept.cache_clear()
    with raises_about("data", "hf", "another version of datasets"):
        source.prepare(print)
    check_place_kept.cache_clear()


def test_what_a_rank_left_out_is_known_at_the_end(tmp_path: Path) -> None:
    texts = ["", None, *("word " * 5 for _ in range(30))] * 2
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"shuffle_buffer": len(texts), "validation_documents": 0}
    stream = Ahead(opened([str(file)], (1, 2), **options))
    assert stream.left_out() == ""
    stream.train(0)
    line = stream.left_out()
    assert re.match(r"data: of the rows in part 1 of 2, Plait left out \d+ row\(s\) without text", line)
