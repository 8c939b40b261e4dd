"""Rows of every form become the same messages, and the same tokens to learn."""

import json

import pytest
import torch

from plait_data.chat import Chat
from plait_data.row_formats import ALPACA, PAIR, PLAIN, SHAREGPT, as_messages
from tests.helpers.chats import CHATS, tokenizer_in

ASKED, ANSWERED = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}
SYSTEM = {"role": "system", "content": "be nice"}
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "well"}
EARLIER = [ASKED, {**ANSWERED, "weight": 0}, ASKED]  # an answer in a prompt is not learned

ROWS = [
    ({"messages": [ASKED, ANSWERED], "prompt": "x", "completion": "y"}, PLAIN, [ASKED, ANSWERED]),
    ({"conversations": [ASKED, ANSWERED]}, PLAIN, [ASKED, ANSWERED]),
    ({"conversations": [HUMAN, GPT]}, SHAREGPT, [ASKED, ANSWERED]),
    ({"messages": [HUMAN, {**GPT, "weight": 0}]}, SHAREGPT, [ASKED, {**ANSWERED, "weight": 0}]),
    ({"conversations": [HUMAN, GPT], "system": "be nice"}, SHAREGPT, [SYSTEM, ASKED, ANSWERED]),
    ({"conversations": [{"from": "system", "value": "be nice"}, HUMAN, GPT]}, SHAREGPT, [SYSTEM, ASKED, ANSWERED]),
    ({"prompt": "hi", "completion": "well", "instruction": "x", "output": "y"}, PAIR, [ASKED, ANSWERED]),
    ({"prompt": [ASKED, ANSWERED, ASKED], "completion": [ANSWERED]}, PAIR, [*EARLIER, ANSWERED]),
    ({"prompt": [SYSTEM, ASKED], "completion": "well"}, PAIR, [SYSTEM, ASKED, ANSWERED]),
    ({"instruction": "hi", "output": "well"}, ALPACA, [ASKED, ANSWERED]),
    ({"instruction": "hi", "input": None, "output": "well", "system": "be nice"}, ALPACA, [SYSTEM, ASKED, ANSWERED]),
    ({"instruction": "a", "input": "b", "output": "well"}, ALPACA, [{**ASKED, "content": "a\n\nb"}, ANSWERED]),
]


@pytest.mark.parametrize(("row", "form", "messages"), ROWS)
def test_a_row_is_told_by_its_keys(row, form, messages):
    read = as_messages(row, None, "row 1")
    assert (read.format, read.messages) == (form, messages)


def test_a_named_key_alone_is_read():
    row = {"turns": [HUMAN, GPT], "messages": "x"}
    assert as_messages(row, "turns", "row 1").messages == [ASKED, ANSWERED]


FORMS = {
    PLAIN: lambda asked, answered: {"messages": [{**ASKED, "content": asked}, {**ANSWERED, "content": answered}]},
    SHAREGPT: lambda asked, answered: {"conversations": [{**HUMAN, "value": asked}, {**GPT, "value": answered}]},
    PAIR: lambda asked, answered: {"prompt": asked, "completion": answered},
    ALPACA: lambda asked, answered: {"instruction": asked, "input": "", "output": answered},
}


def test_all_forms_train_on_the_same_tokens(tmp_path, said):
    """Those of messages, label by label; rows of two forms in a file are counted, and so are keys that are not read."""
    folder = tokenizer_in(tmp_path / "tokenizer")
    turns = [(chat[0]["content"], chat[1]["content"]) for chat in CHATS]
    batches = {}
    for number, (form, row) in enumerate(FORMS.items()):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row(*turn)) + "\n" for turn in turns))
        made = Chat(path=str(path), tokenizer=str(folder), validation_fraction=0.1)
        made.prepare(said.append)
        assert f"rows are read as {form}" in said
        batches[form] = made.open(seq_len=64, seed=1, global_batch_size=4, dp=(0, 1)).take(0)
    for form, batch in batches.items():
        assert torch.equal(batch.tokens, batches[PLAIN].tokens), form
        assert torch.equal(batch.labels, batches[PLAIN].labels), form
    said.clear()
    rows = [FORMS[PAIR]("a", "b"), *[{**FORMS[ALPACA]("a", f"{number}"), "id": 1} for number in range(2)]]
    (tmp_path / "both.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Chat(path=str(tmp_path / "both.jsonl"), tokenizer=str(folder), validation_fraction=0).prepare(said.append)
    assert f"rows differ in their format, and are read so: 2 as {ALPACA}, 1 as {PAIR}" in said
    assert "rows hold keys beside their messages and tools, which are not read: id of 2" in said
