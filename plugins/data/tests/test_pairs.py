"""Preferences: what of a row is compared, which rows belong together, and what is refused."""

import json

import numpy as np
import pytest
import torch

from plait import PlaitError
from plait_data.pairs import Pairs
from plait_data.preference_rows import preferences
from tests.helpers.chats import CHATS, tokenizer_in


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


def said(text):
    return [{"role": "assistant", "content": text}]


PAIRS = [{"prompt": chat[:-1], "chosen": chat[-1:], "rejected": said(f"no {i}")} for i, chat in enumerate(CHATS[:12])]
WHOLE = [{"chosen": [*row["prompt"], *row["chosen"]], "rejected": [*row["prompt"], *row["rejected"]]} for row in PAIRS]
LABELS = [{"prompt": f"what is {i}?", "completion": f"it is {i}", "label": i % 3 == 0} for i in range(12)]


def source(path, folder, rows, **options):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = Pairs(path=str(path), tokenizer=str(folder), **{"validation_fraction": 0.2, **options})
    made.check(seq_len=96, vocab_size=512)
    return made


def opened(path, folder, rows, dp=(0, 1), size=4, seq_len=160, **options):
    return source(path, folder, rows, **options).open(seq_len=seq_len, seed=1, global_batch_size=size, dp=dp)


def learned(batch, folder):
    """The text of each row's labels."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return [tokenizer.decode(row[row >= 0]) for row in batch.labels]


@pytest.mark.parametrize("rows", [PAIRS, WHOLE], ids=["with a prompt", "whole conversations"])
def test_only_the_last_answers_are_compared(tmp_path, folder, rows):
    """Answers in the prompt are not, and the two rows of a pair come together in every epoch."""
    batches = opened(tmp_path / "a.jsonl", folder, rows, validation_fraction=0)
    assert batches.epoch == batches.texts == 24
    answers = {f"{row['chosen'][-1]['content']}<|im_end|>": row["rejected"][-1]["content"] for row in rows}
    seen = []
    for step in range(12):
        batch = batches.take(4 * step)
        assert batch.marks.tolist() == [1, 0, 1, 0]
        assert (batch.texts[1::2] - batch.texts[0::2]).tolist() == [1, 1]
        texts = learned(batch, folder)
        assert [f"{answers[text]}<|im_end|>" for text in texts[0::2]] == texts[1::2]
        seen += batch.texts.tolist()
    assert sorted(seen) == sorted([*range(24)] * 2)


def test_answers_with_labels_have_another_answer_beside_them(tmp_path, folder):
    batches = opened(tmp_path / "a.jsonl", folder, LABELS, validation_fraction=0, size=24)
    batch = batches.take(0)
    texts, number = learned(batch, folder), (batch.texts // 2).tolist()
    own = [f"it is {number[row]}<|im_end|>" for row in range(0, 24, 2)]
    mates = [f"it is {(number[row] + 1) % 12}<|im_end|>" for row in range(0, 24, 2)]
    assert (texts[0::2], texts[1::2]) == (own, mates)
    assert batch.marks[0::2].tolist() == [int(one % 3 == 0) for one in number[0::2]]
    assert set(batch.marks[1::2].tolist()) == {-1}


def test_every_number_of_ranks_has_the_same_batch(tmp_path, folder):
    whole = opened(tmp_path / "a.jsonl", folder, PAIRS).take(8)
    parts = [opened(tmp_path / "a.jsonl", folder, PAIRS, dp=(rank, 2)).take(8) for rank in range(2)]
    for name in ("tokens", "labels", "marks", "texts"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts]))


def test_what_is_held_out_is_not_trained_on(tmp_path, folder):
    batches = opened(tmp_path / "a.jsonl", folder, PAIRS)
    train = np.concatenate([batches.take(4 * step).texts for step in range(batches.epoch // 4 + 1)])
    held = np.concatenate([batches.validation(step).texts for step in range(4)])
    assert not {*train} & {*held}
    assert {*train} | {*held} == {*range(24)}


def test_texts_of_a_validation_set_have_numbers_of_their_own(tmp_path, folder):
    (tmp_path / "other.jsonl").write_text(json.dumps(PAIRS[0]) + "\n")
    batches = opened(tmp_path / "a.jsonl", folder, PAIRS, validation_path=str(tmp_path / "other.jsonl"))
    assert batches.texts == 26
    assert set(batches.validation(0).texts.tolist()) == {24, 25}


def test_a_prompt_that_ends_within_a_turn_is_not_dropped(tmp_path, folder):
    """Answers that begin with what a tool said follow the prompt."""
    tool = {"role": "tool", "content": "9"}
    row = {**PAIRS[0], "chosen": [tool, *said("it is 9")], "rejected": [tool, *said("it is 8")]}
    one, other = next(preferences([("a", row, 1)], "pairs of answers")).rows
    assert [message["role"] for message in one.messages] == [m["role"] for m in row["prompt"]] + ["tool", "assistant"]
    assert one.messages[:-1] == other.messages[:-1]


def test_all_files_tell_of_what_kind_the_rows_are(tmp_path, folder):
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LABELS))
    for first in ([], LABELS[:1]):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in first) or "\n")
        made = Pairs(path=str(tmp_path), tokenizer=str(folder))
        made.check(seq_len=96, vocab_size=512)
        assert made.gives == "answers with labels"


def test_a_set_of_the_other_kind_is_refused(tmp_path, folder):
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LABELS))
    with pytest.raises(PlaitError, match=r"the set to validate on '.*' gives answers with labels"):
        opened(tmp_path / "a.jsonl", folder, PAIRS, validation_path=str(tmp_path / "other.jsonl"))


REFUSED = {
    "no preference": ([{"text": "a"}], "a row with the keys text holds no preference"),
    "two kinds": ([PAIRS[0], LABELS[0]], "the row gives answers with labels, but the first row gives pairs of answers"),
    "no prompt": ([{"chosen": "a", "rejected": "b"}], "chosen and rejected have no prompt in common"),
    "a number": ([{**LABELS[0], "label": 1}], "label must be true or false, not 1"),
    "one answer": (LABELS[:1], "needs a second row"),
    "alike": ([{**PAIRS[0], "rejected": PAIRS[0]["chosen"]}], "no row has two different answers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit(tmp_path, folder, case):
    rows, sentence = REFUSED[case]
    with pytest.raises(PlaitError) as caught:
        opened(tmp_path / "a.jsonl", folder, rows)
    assert sentence in str(caught.value)
