"""A mixture: its samples are those of its sources, in order, whatever the ranks, the batch and the weights later."""

import json

import pytest
import torch

from plait import PlaitError
from plait.host import check, compose
from plait.testing import raises_about
from plait_data.mix import Mix
from tests.helpers.chats import CHATML, CHATS, tokenizer_in, written

T = 16


@pytest.fixture
def texts(tmp_path):
    """Two files of text; in each, no two samples are alike."""
    for name, count in (("a", 300), ("b", 40)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} has line {i}; " for i in range(count)))
    rows = [{"text": "".join(f"c{i:03d}{j} " for j in range(5))} for i in range(200)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def text(folder, name, **options):
    return {"kind": "text", "path": str(folder / f"{name}.txt"), "validation_fraction": 0, **options}


def stream(folder):
    files = str(folder / "c.jsonl")
    return {"kind": "hf", "name": "json", "data_files": files, "shuffle_buffer": 8, "validation_documents": 0}


def mixture(folder, weights, streams=(), **options):
    nodes = {name: stream(folder) if name in streams else text(folder, name) for name in weights}
    made = Mix(sources=nodes, weights=weights, **options)
    made.check(seq_len=T, vocab_size=257)
    made.prepare(lambda line: None)
    return made


def opened(made, batch=4, dp=(0, 1)):
    return made.open(seq_len=T, seed=3, global_batch_size=batch, dp=dp)


def words(batch):
    return ["".join(chr(number) for number in row) for row in batch.tokens.tolist()]


def test_each_source_goes_through_its_own_samples(texts):
    """In the order that it has alone; the smaller one begins again."""
    made = mixture(texts, {"b": 1, "a": 2})
    batches, alone = opened(made), {name: opened(one, batch=1) for name, one in made.members.items()}
    seen = {"a": [], "b": []}
    for step in range(60):
        batch = batches.train(step)
        for row, source in zip(words(batch), batch.sources.tolist(), strict=True):
            seen[batches.sources[source]].append(row)
    assert {name: len(rows) for name, rows in seen.items()} == {"a": 160, "b": 80}
    for name, rows in seen.items():
        assert rows == [words(alone[name].take(number))[0] for number in range(len(rows))]
    assert alone["b"].epoch < 80
    assert batches.passes(240) == {"epoch/a": 160 / alone["a"].epoch, "epoch/b": 80 / alone["b"].epoch}


def test_a_damaged_history_is_refused_before_ranks_start(texts):
    with raises_about("data.history"):
        mixture(texts, {"a": 1, "b": 1}, history=[[8, {"weights": {"a": 1}}]])


def test_ranks_and_batches_change_no_sample(texts):
    made = mixture(texts, {"a": 0.7, "b": 0.3})
    whole = [row for step in range(6) for row in words(opened(made).train(step))]
    for batch, count in ((4, 2), (4, 4), (6, 3), (12, 2)):
        ranks = [opened(made, batch, (index, count)) for index in range(count)]
        found = [row for first in range(0, 24, batch) for rank in ranks for row in words(rank.take(first))]
        assert found == whole


def test_rows_of_documents_and_of_plain_text_attend_as_they_would_alone(texts):
    nodes = {"a": text(texts, "a"), "b": text(texts, "b", attention="document")}
    made = Mix(sources=nodes, weights={"a": 1, "b": 1})
    made.prepare(lambda line: None)
    assert (made.attention, mixture(texts, {"a": 1, "b": 1}).attention) == ("document", "across")
    batch = opened(made).take(0)
    assert all(torch.equal(batch.positions[i], torch.arange(T)) for i in range(4) if batch.sources[i] == 0)
    assert opened(mixture(texts, {"a": 1, "b": 1})).take(0).positions is None


def test_a_mixture_with_a_stream_goes_on_where_it_was(texts):
    """In parts, with another batch, the samples of every source follow one another and the shares stay exact."""
    pytest.importorskip("datasets")
    made = mixture(texts, {"a": 2, "c": 1}, streams="c")
    assert not made.indexable

    def taken(parts, batch, first, last):
        return [words(part.take(at)) for at in range(first, last, batch) for part in parts]

    def two(batch):
        return [opened(made, batch, (index, 2)) for index in range(2)]

    whole = taken(two(4), 4, 0, 24)
    parts = two(4)
    before = taken(parts, 4, 0, 12)
    states = [json.loads(json.dumps(part.state_dict())) for part in parts]
    for batch in (4, 6):
        again = two(batch)
        for part, state in zip(again, states, strict=True):
            part.load_state_dict(state)
        rows = taken(again, batch, 12, 24)
        if batch == 4:
            assert before + rows == whole
        everything = [row for part in before + rows for row in part]
        assert len({*everything}) == 24
        assert sum("c" in row for row in everything) == 8


def test_weights_change_by_saying_so_and_from_the_next_sample_on(texts):
    was, now = {"a": 2, "b": 1}, {"a": 1, "b": 3}
    nodes = {name: text(texts, name) for name in was}
    before = {"sources": nodes, "weights": was, "history": []}
    assert mixture(texts, was).resumed(before, 12) == {"history": []}
    with raises_about("data.change_weights", False, (True,)) as caught:
        mixture(texts, now).resumed(before, 12)
    assert "data.weights.a=1, but the checkpoint was trained with 2" in str(caught.value)
    kept = mixture(texts, now, change_weights=True).resumed(before, 12)
    assert kept == {"history": [[12, {"weights": was}]]}
    changed, same = opened(mixture(texts, now, **kept)), opened(mixture(texts, was))
    assert [words(changed.take(at)) for at in (0, 4, 8)] == [words(same.take(at)) for at in (0, 4, 8)]
    alone = opened(mixture(texts, was).members["b"], batch=1)
    rows = [
        (n, row) for at in (12, 16) for n, row in zip(changed.take(at).sources, words(changed.take(at)), strict=True)
    ]
    assert [row for number, row in rows if number == 1] == [words(alone.take(4 + n))[0] for n in range(6)]
    # A further start with the new weights keeps what was; another change is added.
    assert mixture(texts, now).resumed({**before, "weights": now, **kept}, 40) == kept
    budgets = Mix(sources=nodes, tokens={"a": 640, "b": 160}, change_weights=True)
    more = budgets.resumed({**before, "weights": now, **kept}, 40)
    assert more["history"] == [*kept["history"], [40, {"weights": now}]]
    with raises_about("data.sources", ["a"], ["a", "b"]):
        mixture(texts, {"a": 1}).resumed(before, 12)


def test_budgets_are_one_epoch(texts):
    nodes = {name: text(texts, name) for name in ("a", "b")}
    made = Mix(sources=nodes, tokens={"a": 16 * 9, "b": 16 * 4 - 3})
    made.prepare(lambda line: None)
    batches = opened(made, batch=1)
    assert batches.epoch == 13
    sources = [int(batches.take(number).sources) for number in range(13)]
    assert (sources.count(0), sources.count(1)) == (9, 4)
    assert batches.passes(13)["epoch"] == 1


def test_held_out_samples_are_mixed_too(texts):
    nodes = {"a": text(texts, "a", validation_fraction=0.2), "b": text(texts, "b"), "c": stream(texts)}
    nodes["c"]["validation_documents"] = 20
    made = Mix(sources=nodes, weights={"a": 1, "b": 5, "c": 1})
    made.prepare(lambda line: None)
    assert made.has_validation
    batches = opened(made)
    assert sorted(batches.validation(0).sources.tolist()) == [0, 0, 2, 2]
    halves = [opened(made, dp=(index, 2)).validation(1) for index in range(2)]
    assert torch.equal(torch.cat([half.tokens for half in halves]), batches.validation(1).tokens)


def test_the_model_s_tokenizer_is_that_of_all_sources(tmp_path, texts):
    folder, chats = tokenizer_in(tmp_path / "tokenizer"), written(tmp_path / "chats.jsonl", CHATS)
    nodes = {"chat": {"kind": "chat", "path": str(chats), "validation_fraction": 0}, "a": text(texts, "a")}
    made = Mix(sources=nodes, weights={"chat": 1, "a": 1}, tokenizer=str(folder))
    assert {one.tokenizer for one in made.members.values()} == {str(folder)}
    assert made.vocabulary == 400
    said = []
    made.prepare(said.append)
    assert any(line.startswith("chat: rows are read as messages") for line in said)
    assert made.decoded([65, 66])
    (tmp_path / "own.jinja").write_text(CHATML)
    own = str(tmp_path / "own.jinja")
    made = Mix(sources=nodes, weights={"chat": 1, "a": 1}, tokenizer=str(folder), template=own)
    assert made.members["chat"].template == own
    with raises_about("data.sources.chat.template", own, (None,)):
        alone = {**nodes, "chat": {**nodes["chat"], "template": own}}
        Mix(sources=alone, weights={"chat": 1, "a": 1}, tokenizer=str(folder)).members  # noqa: B018
    nodes["a"]["tokenizer"] = "bytes"
    with raises_about("data.sources.chat.tokenizer", str(folder), "bytes"):
        Mix(sources=nodes, weights={"chat": 1, "a": 1}, tokenizer=str(folder)).members  # noqa: B018


A, AB = "{a: {kind: text, path: a.txt}}", "{a: {kind: text, path: a.txt}, b: {kind: text, path: a.txt}}"
REFUSED = [
    ("data.weights", A, "", "takes data.weights or data.tokens, and has neither: a number for each of a"),
    ("data.weights", A, "{b: 1}", "data.weights names 'b', which is not among the sources a"),
    ("data.weights", AB, "{a: 1}", "does not name all of the sources a, b"),
    ("data.weights.a", A, "{a: -1}", "a number of at least 0"),
    ("data.weights", A, "{a: 0}", "at least one number above 0"),
    ("data.sources", "{a b: {kind: text, path: a.txt}}", "{a: 1}", "'a b' is no name of a source"),
    ("data.sources.a", "{a: text}", "{a: 1}", "a data config, such as"),
    (
        "data.sources.a.kind",
        "{a: {kind: txt, path: a.txt}}",
        "{a: 1}",
        "txt is none of the installed sources that fit here: chat",
    ),
    ("data.sources.a.path", "{a: {kind: text}}", "{a: 1}", "data.sources.a.path"),
    ("data.sources.a.path", "{a: {kind: text, path: no.txt}}", "{a: 1}", "data.sources.a.path=no.txt does not exist"),
    ("data.sources.a.pth", "{a: {kind: text, path: a.txt, pth: x}}", "{a: 1}", "unknown key data.sources.a.pth"),
    ("model.vocab_size", A, "{a: 1}", "model.vocab_size=100"),
]


@pytest.mark.parametrize(("key", "sources", "weights", "says"), REFUSED)
def test_what_does_not_fit_is_told_by_its_key(texts, monkeypatch, key, sources, weights, says):
    monkeypatch.chdir(texts)
    sizes = ["model.vocab_size=100"] if "vocab" in key else []
    given = [f"data.weights={weights}"] if weights else []
    with pytest.raises(PlaitError) as caught:
        check(compose(["data=mix", f"data.sources={sources}", *given, *sizes, "strategy=[]"]), 1)
    assert says in str(caught.value)
    assert caught.value.key == key


def test_advice_names_the_keys_of_its_source(texts):
    made = Mix(sources={"b": text(texts, "b", validation_fraction=0.02)}, weights={"b": 1})
    made.prepare(lambda line: None)
    with pytest.raises(PlaitError) as caught:
        made.check_length(seq_len=T)
    said = str(caught.value)
    assert said.startswith("data.sources.b: data has 12 tokens held out for validation")
    assert "raise data.sources.b.validation_fraction to" in said
    assert said.endswith("or set data.sources.b.validation_fraction=0")
