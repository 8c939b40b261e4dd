"""One batch is read ahead of every source, and neither its batches nor its state are others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from plait import Batch, Batches
from plait.data.ahead import Ahead
from plait_data import stream
from plait_data.chat import Chat
from plait_data.hf import Hf
from plait_data.text import Text
from tests.helpers.chats import CHATS, tokenizer_in, written

G = 4


def opened(kind: str, folder: Path) -> Batches:
    source: Any
    if kind == "chat":
        path = written(folder / "chats.jsonl", CHATS)
        source = Chat(path=str(path), tokenizer=str(tokenizer_in(folder)), validation_fraction=0.1)
    else:
        path = folder / "text.jsonl"
        path.write_text("".join(json.dumps({"text": f"<{i} " + "words " * (i * 5 % 11)}) + "\n" for i in range(90)))
        if kind == "text":
            source = Text(path=str(path), validation_fraction=0.2)
        else:
            source = Hf(name="json", data_files=str(path), shuffle_buffer=7, validation_documents=9)
    return source.open(seq_len=64 if kind == "chat" else 16, seed=1, global_batch_size=G, dp=(0, 1))


def same(one: Batch, other: Batch) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in ((one.tokens, other.tokens), (one.labels, other.labels), (one.positions, other.positions))
        if a is not None or b is not None
    )


@pytest.mark.parametrize("kind", ["text", "chat", "hf"])
def test_every_source_gives_the_same_batches_and_resumes_with_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "DEPTH", 8)
    plain, ahead = opened(kind, tmp_path), Ahead(opened(kind, tmp_path))
    states, batches = [], []
    for step in range(6):
        states.append(json.dumps(ahead.state_dict()))
        assert json.loads(states[-1]) == plain.state_dict()
        batches.append(plain.train(step))
        assert same(ahead.train(step), batches[-1])
        assert same(ahead.validation(step), plain.validation(step))
    resumed = Ahead(opened(kind, tmp_path))
    resumed.load_state_dict(json.loads(states[3]))
    assert all(same(resumed.train(step), batches[step]) for step in (3, 4, 5))
    ahead.load_state_dict(json.loads(states[2]))
    assert all(same(ahead.train(step), batches[step]) for step in (2, 3))
