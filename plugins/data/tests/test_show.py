"""`plait data`: what people see is what a rank gets."""

import re

from plait.commands.main import run
from tests.helpers.chats import CHATS, tokenizer_in, written

TINY = ["model.dim=16", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=16"]


def shown(capsys, *arguments):
    assert run("data", [*TINY, *arguments]) == 0
    return capsys.readouterr().out


def test_answers_are_marked(tmp_path, capsys):
    """Each with the token that ends its turn, and nothing else; what fills up a row is counted."""
    folder, chats = tokenizer_in(tmp_path / "tokenizer"), written(tmp_path / "chats.jsonl", CHATS[:7])
    options = [f"data.path={chats}", f"data.tokenizer={folder}", "data.validation_fraction=0", "train.seq_len=256"]
    out = shown(capsys, "data=chat", *options, "model.vocab_size=512", "validation.interval=0", "rows=9")
    answers = sorted(m["content"] for chat in CHATS[:7] for m in chat if m["role"] == "assistant")
    assert sorted(re.findall(r"\{\+(.*?)<\|im_end\|>\+\}", out)) == answers
    assert out.count("{+") == len(answers)
    assert "<|im_start|>user\\n\n  what is 1 times 1? ü please " in out
    assert re.search(r"\n  <\|endoftext\|> \d+ times\n", out)
    samples, learned, places = re.search(r"epoch +(\d+) samples(?:.|\n)*learned +([\d,]+) of ([\d,]+)", out).groups()
    assert int(places.replace(",", "")) == int(samples) * 256
    each = [int(count) for count in re.findall(r"^sample \d+: (\d+) of 256 tokens are learned$", out, re.MULTILINE)]
    assert (len(each), sum(each)) == (int(samples), int(learned.replace(",", "")))


def test_documents_of_bytes_stand_apart(tmp_path, capsys):
    """All that stands before the end of a document is learned, and no end asks for the next document."""
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n{"text": "second"}\n')
    options = [f"data.path={tmp_path / 'a.jsonl'}", "data.attention=document", "data.validation_fraction=0"]
    out = shown(capsys, "data=text", *options, "train.seq_len=12", "validation.interval=0", "train.epochs=2")
    begin = "step      8 samples of 12 tokens, on 1 data rank\nepoch     1 sample, 0.125 steps; train.epochs=2\n"
    assert begin in out
    sample = "11 of 12 tokens are learned\n- tokens 0 to 5\n  f{+irst<end>+}\n- tokens 6 to 11\n  s{+econd<end>+}\n"
    assert out.endswith(f"\nsample 0: {sample}")


def test_a_stream_shows_what_comes_first(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "plait"}\n' * 9)
    options = ["data.name=json", f"data.data_files={tmp_path / 'a.jsonl'}", "data.validation_documents=0"]
    out = shown(capsys, "data=hf", *options, "train.seq_len=11", "validation.interval=0", "rows=1")
    assert "epoch     not known: the data are read as they come; train.steps=140\n" in out
    assert out.endswith("sample 0: 11 of 11 tokens are learned\n  plait<end>plait<end>\n")


def test_a_mixture_shows_each_of_its_sources(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("plait " * 90)
    (tmp_path / "b.txt").write_text("rope " * 40)
    nodes = (f"{name}: {{kind: text, path: {tmp_path / name}.txt, validation_fraction: 0}}" for name in "ab")
    options = [f"data.sources={{{', '.join(nodes)}}}", "data.weights={a: 3, b: 1}", "train.steps=10"]
    out = shown(capsys, "data=mix", *options, "train.seq_len=12", "validation.interval=0", "rows=4")
    assert "a         75 of these samples; 900 of 900 tokens, 100.0%; 1.33 epochs in the run\n" in out
    assert "b         25 of these samples; 300 of 300 tokens, 100.0%; 1.25 epochs in the run\n" in out
    assert re.search(r"sample 0 of a: 12 of 12 tokens(.|\n)*sample 2 of a: 12 of 12(.|\n)*sample 3 of b", out)
