"""Masked tokens: which are hidden, by what, and that nothing but seed, sample and place decides."""

import json

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from plait import IGNORE
from plait.testing import raises_about
from plait_data.masked import Masked
from plait_data.masks import Masks

WORDS = [f"w{n}" for n in range(40)]


@pytest.fixture
def tokenizer(tmp_path):
    """WordPiece: ids 0 to 3 are special; every third word is in two pieces."""
    names = [
        "[PAD]",
        "[SEP]",
        "[MASK]",
        "[UNK]",
        *(w for w in WORDS if int(w[1:]) % 3),
        "w",
        *(f"##{n}" for n in range(40)),
    ]
    made = Tokenizer(models.WordPiece({name: at for at, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:4]])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[SEP]", "mask_token": "[MASK]"}))
    return str(folder)


@pytest.fixture
def text(tmp_path):
    generator = np.random.default_rng(0)
    file = tmp_path / "text.jsonl"
    rows = [{"text": " ".join(generator.choice(WORDS, 50))} for _ in range(120)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "text", "path": str(file), "validation_fraction": 0.2}


def opened(source, dp=(0, 1), size=4, seed=0):
    source.check(seq_len=16, vocab_size=None)
    source.prepare(lambda line: None)
    return source.open(seq_len=16, seed=seed, global_batch_size=size, dp=dp)


def _labels_by_text(batch):
    """What stood there -> the labels, of each row."""
    original = torch.where(batch.labels != IGNORE, batch.labels, batch.tokens)
    return {tuple(row): labels for row, labels in zip(original.tolist(), batch.labels.tolist(), strict=True)}


def test_shares_are_those_that_are_asked_for():
    masks = Masks(2, np.arange(4), np.arange(4, 1000), 0.15, (0.8, 0.1, 0.1), None)
    tokens = np.random.default_rng(0).integers(0, 1000, (400, 512))
    shown, labels = masks.hidden(tokens, np.arange(400), "a")
    chosen = labels != IGNORE
    assert (labels[chosen] == tokens[chosen]).all()
    assert (shown[~chosen] == tokens[~chosen]).all()
    assert not chosen[tokens < 4].any()
    n = chosen.sum()  # 30,580 of 203,800: five standard deviations are 0.004, 0.011 and 0.009
    assert abs(n / (tokens >= 4).sum() - 0.15) < 0.004
    assert abs((shown[chosen] == 2).mean() - 0.8) < 0.0115
    assert abs((shown[chosen] == tokens[chosen]).mean() - 0.1) < 0.009
    assert shown[chosen & (shown != 2)].min() >= 4
    places = chosen.mean(0)  # no place of a row, and no row, is chosen more often
    assert places.std() < 1.3 * (0.15 * 0.85 / 400) ** 0.5
    other = masks.hidden(tokens, np.arange(400), "b")[1] != IGNORE
    assert abs((chosen & other).sum() / n - 0.15) < 0.011


def test_every_layout_and_every_batch_size_sees_the_same(tokenizer, text):
    whole = opened(Masked(source=text, tokenizer=tokenizer))
    parts = [opened(Masked(source=text, tokenizer=tokenizer), dp=(rank, 2)) for rank in range(2)]
    for first in (0, 4, 400):
        rows = torch.cat([part.take(first).tokens for part in parts])
        assert whole.take(first).tokens.equal(rows)
    larger = opened(Masked(source=text, tokenizer=tokenizer), size=8).take(4)
    assert larger.labels[:4].equal(whole.take(4).labels)
    assert larger.labels[4:].equal(whole.take(8).labels)


def test_an_epoch_later_other_tokens_are_hidden_but_in_validation_the_same(tokenizer, text):
    one, two = (opened(Masked(source=text, tokenizer=tokenizer), seed=seed) for seed in (0, 1))
    assert not one.take(0).labels.equal(two.take(0).labels)
    passes = opened(Masked(source=text, tokenizer=tokenizer), size=one.epoch)
    first, second = (_labels_by_text(passes.train(step)) for step in range(2))
    assert first.keys() == second.keys()
    assert sum(first[row] == second[row] for row in first) < len(first) / 10
    assert one.validation(1).tokens.equal(two.validation(1).tokens)
    assert one.validation(1).labels.equal(two.validation(1).labels)
    held = one.held_out()
    again = opened(Masked(source=text, tokenizer=tokenizer), size=held)
    assert again.validation(0).tokens.equal(again.validation(1).tokens)


def test_whole_words_is_yes_or_no(tokenizer, text):
    with pytest.raises(TypeError, match="whole_words"):
        Masked(source=text, tokenizer=tokenizer, whole_words="yes")


def test_whole_words_are_hidden_together(tokenizer, text):
    source = Masked(source=text, tokenizer=tokenizer, whole_words=True, rate=0.4, replaced=[1, 0, 0])
    batches = opened(source)
    inside = ~source.masks.starts
    pieces = 0
    for step in range(20):
        batch = batches.train(step)
        hidden = (batch.labels != IGNORE).numpy()
        original = np.where(hidden, batch.labels, batch.tokens)
        follows = inside[original[:, 1:]]
        assert (hidden[:, 1:] == hidden[:, :-1])[follows].all()
        pieces += int(follows.sum())
    assert pieces > 100


def test_documents_keep_their_positions(tokenizer, text):
    batch = opened(Masked(source={**text, "attention": "document"}, tokenizer=tokenizer, rate=0.5)).take(0)
    assert batch.positions is not None
    assert (batch.labels != IGNORE).any()


@pytest.mark.parametrize(
    ("key", "value"),
    [("rate", 0.0), ("rate", 1), ("replaced", [0.5, 0.1, 0.1]), ("replaced", [1, 0]), ("source", "text")],
)
def test_options_that_do_not_fit(key, value):
    with raises_about(f"data.{key}", value):
        Masked(**{"source": {"kind": "stdlib"}, key: value})


def test_a_tokenizer_without_a_mask_token(text, tokenizer):
    with raises_about("data.tokenizer", "bytes"):
        _ = Masked(source=text, tokenizer="bytes").masks
    with raises_about("data.mask_token", "[HIDE]"):
        _ = Masked(source=text, tokenizer=tokenizer, mask_token="[HIDE]").masks


INNER = [  # the config of the source, the key that is wrong and its value
    ({"kind": "chat", "path": "c.jsonl"}, "data.source.kind", "chat"),
    ({"_target_": "plait_data.chat.Chat", "path": "c.jsonl"}, "data.source", "Chat"),
    ({"kind": "text"}, "data.source.path", None),
    ({"kind": "text", "path": "no.txt"}, "data.source.path", "no.txt"),
    ({"kind": "stdlib", "tokenizer": "bytes"}, "data.source.tokenizer", "bytes"),
    ({"kind": "stdlib", "words": 1}, "data.source.words", None),
]


@pytest.mark.parametrize(("source", "key", "value"), INNER)
def test_what_is_wrong_with_the_source_names_its_key(source, key, value, tokenizer):
    with raises_about(key, *([] if value is None else [value])):
        Masked(source=source, tokenizer=tokenizer).check(seq_len=16, vocab_size=None)


def test_a_tokenizer_that_is_larger_than_the_model_is_told_by_the_key_of_both(tokenizer, text):
    with raises_about("model.vocab_size", 50):
        Masked(source=text, tokenizer=tokenizer).check(seq_len=16, vocab_size=50)
    with raises_about("data.tokenizer", "none"):
        Masked(source=text, tokenizer="none").check(seq_len=16, vocab_size=None)
