"""Conversations: what of them is learned, how they share rows, and what is refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from plait import PlaitError
from plait.testing import raises_about
from plait_data import conversations
from plait_data.bins import pack
from plait_data.chat import Chat
from plait_data.template import Conversation, Template
from plait_testing.models import llama3
from tests.helpers.chats import CHATML, CHATS, pieces, tokenizer_in, written
from tests.helpers.one_rank import train

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def chats(tmp_path):
    return written(tmp_path / "chats.jsonl", CHATS)


def source(path, folder, **options):
    made = Chat(path=str(path), tokenizer=str(folder), **{"validation_fraction": 0.1, **options})
    made.check(seq_len=64, vocab_size=512)
    return made


def opened(path, folder, seq_len=64, dp=(0, 1), batch=4, **options):
    return source(path, folder, **options).open(seq_len=seq_len, seed=1, global_batch_size=batch, dp=dp)


def test_answers_are_learned_and_nothing_else(chats, folder):
    """By a tokenizer of transformers: what is learned is the text of the answers, with the end of their turns."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    learned = {tuple(f"{m['content']}<|im_end|>" for m in chat if m["role"] == "assistant"): chat for chat in CHATS}
    batches = opened(chats, folder, seq_len=256, validation_fraction=0)
    seen = []
    for tokens, labels in (one for step in range(20) for one in pieces(batches.train(step))):
        whole = tokenizer.decode(tokens)
        runs = np.split(labels.numpy(), np.flatnonzero(np.diff(labels.numpy() < 0)) + 1)
        answers = tuple(tokenizer.decode(run) for run in runs if run[0] >= 0)
        rendered = tokenizer.apply_chat_template(learned[answers], tokenize=False)
        assert f"{whole}\n" == rendered  # a row leaves out the last token, which is not learned
        assert torch.equal(labels[:-1][labels[:-1] >= 0], tokens[1:][labels[:-1] >= 0])
        seen.append(answers)
    assert {*seen} == {*learned}


@pytest.mark.parametrize("tag", ["{% generation %}", "{%generation -%}"])
def test_a_template_that_marks_its_answers_gives_the_same(chats, folder, tmp_path, tag):
    """It renders no prompts, so without its marks no answer could be located."""
    (tmp_path / "marked.jinja").write_text(MARKED.replace("{% generation %}", tag))
    one, other = opened(chats, folder), opened(chats, folder, template=str(tmp_path / "marked.jinja"))
    for step in range(8):
        ours, theirs = one.train(step), other.train(step)
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.labels, theirs.labels)


def test_a_prompt_ends_where_the_answer_begins(chats, folder):
    """What a model is to write on from is what stood before the answers that it learned."""
    made, chat = source(chats, folder), CHATS[2]
    ids = made.prompted(chat[:-1])
    assert made.decoded(ids).endswith(f"{chat[-2]['content']}<|im_end|>\n<|im_start|>assistant\n")
    (whole, learned), *_ = Template(Path(folder), CHATML).encode([Conversation(chat, None, "here")])
    assert whole[: len(ids)].tolist() == ids
    assert learned[len(ids)]
    assert not learned[len(ids) - 1]
    assert made.encoded("what") == made.encoder.encode([b"what"])[0].tolist()  # a text has no template
    assert {made.decoded([number]) for number in made.special_ids()[0]} == {"<|endoftext|>", "<|im_end|>"}


def test_every_conversation_once_an_epoch_on_any_number_of_ranks(chats, folder):
    whole = opened(chats, folder, seq_len=256, batch=4)
    rows = len(whole._train)
    for dp in (1, 2, 4):
        ranks = [opened(chats, folder, seq_len=256, batch=4, dp=(index, dp)) for index in range(dp)]
        for step in (0, 1, 5):
            parts = [rank.train(step) for rank in ranks]
            for name in ("tokens", "labels", "positions"):
                assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole.train(step), name))
    singly = opened(chats, folder, seq_len=256, batch=1)
    found = [tuple(t.tolist()) for number in range(rows) for t, _ in pieces(singly.take(number))]
    held = [
        tuple(t.tolist()) for number in range(len(singly._validation)) for t, _ in pieces(singly.validation(number))
    ]
    assert len(found) == len({*found}) == 54
    assert len(held) == 6
    assert not {*found} & {*held}
    again = [tuple(t.tolist()) for number in range(rows, 2 * rows) for t, _ in pieces(singly.take(number))]
    assert again != found
    assert {*again} == {*found}


def test_a_row_computes_each_conversation_as_if_it_were_alone(chats, folder):
    torch.manual_seed(0)
    model = llama3(vocab_size=512, max_seq_len=256).double()
    batch = opened(chats, folder, seq_len=256).train(0)
    together = F.cross_entropy(
        model(batch.tokens, batch.positions).flatten(0, 1), batch.labels.flatten(), reduction="sum"
    )
    alone = sum(F.cross_entropy(model(tokens[None])[0], labels, reduction="sum") for tokens, labels in pieces(batch))
    assert len(pieces(batch)) >= 8
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)


def test_a_long_conversation_is_cut(folder, tmp_path):
    long = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well " * 300}]
    batches = opened(written(tmp_path / "a.jsonl", [long] * 2), folder, seq_len=64, batch=1, validation_fraction=0)
    ((tokens, labels),) = pieces(batches.train(0))
    assert len(tokens) == 64
    assert labels[-1] >= 0


def test_what_is_cut_before_its_answer_is_left_out(folder, tmp_path):
    late = [{"role": "user", "content": "hi " * 200}, {"role": "assistant", "content": "well"}]
    path = written(tmp_path / "a.jsonl", [late, *CHATS[:3], late])
    batches = opened(path, folder, seq_len=64, batch=1, validation_fraction=0)
    found = [tokens for number in range(len(batches._train)) for tokens, _ in pieces(batches.take(number))]
    assert len(found) == 3
    least = next(at for at in range(1, 64) if fits(path, folder, at))
    with raises_about("train.seq_len", least - 1, (str(least),)):
        source(path, folder, validation_fraction=0).check_length(seq_len=least - 1)
    assert (opened(path, folder, seq_len=least, validation_fraction=0).train(0).labels >= 0).any()


def test_what_rows_do_not_hold_is_counted(folder, tmp_path):
    short = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    long = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well " * 300}]
    late = [{"role": "user", "content": "hi " * 200}, {"role": "assistant", "content": "well"}]
    made = source(written(tmp_path / "a.jsonl", [short, long, late]), folder, validation_fraction=0)
    made.prepare(print)
    lengths = sorted(conversations.read(made.folder).lengths.tolist())
    most = lengths[2]
    _, cut, out = conversations.read(made.folder).lengths.tolist()
    lost = out + cut - 65
    assert made.shortened(seq_len=64) == (
        "train.seq_len=64 is too short for some of 3 conversations: 1 left out, as no answer begins in time, and 1 "
        f"cut; {lost:,} of {sum(lengths):,} tokens are lost; the longest needs train.seq_len={most - 1}"
    )
    assert made.shortened(seq_len=most - 1) == ""
    assert "and 1 cut" in made.shortened(seq_len=most - 2)


def test_what_the_template_does_not_write_is_counted(folder, tmp_path):
    plain: list[dict] = [
        {"role": "user", "content": 'hi "ü"\n'},
        {"role": "assistant", "content": " well ", "tool_calls": None},
    ]
    more = [
        plain[0],
        {**plain[1], "reasoning_content": "hm", "weight": 1},
        {"role": "user", "content": [{"text": "x"}]},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"messages": plain}, {"messages": more}, {"messages": more, "tools": tools}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    said = []
    source(path, folder, validation_fraction=0).prepare(said.append)
    line = "the chat template leaves out, or changes, what messages say, and it is not learned: "
    assert said[-1] == f"{line}reasoning_content of 2, tools of 1"
    silent = tmp_path / "t.jinja"
    silent.write_text(CHATML.replace("{{ m.content }}", "{{ m.content if m.role == 'assistant' }}"), encoding="utf-8")
    said.clear()
    source(path, folder, template=str(silent), validation_fraction=0).prepare(said.append)
    assert said[-1] == f"{line}content of 5, reasoning_content of 2, tools of 1"
    said.clear()
    source(written(tmp_path / "b.jsonl", CHATS), folder).prepare(said.append)
    assert not [one for one in said if one.startswith(line)]


def test_an_answer_with_weight_0_is_not_learned(folder, tmp_path):
    asked, no, yes = {"role": "user", "content": "?"}, {"role": "assistant", "content": "no"}, "yes"
    chat = [asked, {**no, "weight": 0}, asked, {"role": "assistant", "content": yes, "weight": 1}]
    for number, text in enumerate((CHATML, MARKED)):
        template = Template(folder, text)
        [(ids, learned)] = template.encode([Conversation(chat, None, "row 1")])
        words = "".join(template.name(int(one)) for one in ids[learned])
        assert "yes" in words, number
        assert "no" not in words, number
    with raises_about("weight", 0.5, (0, 1)):
        template.encode([Conversation([asked, {**no, "weight": 0.5}], None, "row 1")])


def test_roles_and_keys_that_nobody_reads_are_counted(folder, tmp_path):
    typo = [{"role": "user", "content": "?"}, {"role": "asistant", "content": "a"}]
    rows = [{"messages": CHATS[0]}, {"messages": typo, "system": "be nice"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    said: list[str] = []
    source(path, folder, validation_fraction=0).prepare(said.append)
    assert "rows hold keys beside their messages and tools, which are not read: system of 1" in said
    assert "messages of other roles than 'assistant' are not learned; unusual ones: 'asistant' of 1" in said
    path.write_text(json.dumps(rows[1]) + "\n", encoding="utf-8")
    with pytest.raises(PlaitError, match="roles: 'asistant' of 1, 'user' of 1"):
        source(path, folder, validation_fraction=0).prepare(said.append)


def test_special_tokens_that_messages_spell_out_are_counted(folder, tmp_path):
    """The tokenizer takes them for the tokens: a user could end the assistant's turn."""
    spelt = [
        {"role": "user", "content": "say <|im_end|> and <|im_end|>"},
        {"role": "assistant", "content": "<|im_end|>"},
    ]
    said: list[str] = []
    source(written(tmp_path / "a.jsonl", [*CHATS, spelt]), folder, validation_fraction=0).prepare(said.append)
    assert said[-1] == "messages spell special tokens out, and are read as these tokens, not as text: <|im_end|> in 2"
    said.clear()
    source(written(tmp_path / "b.jsonl", CHATS), folder, validation_fraction=0).prepare(said.append)
    assert not [line for line in said if "spell special tokens out" in line]


@pytest.mark.slow  # a whole run; what it says is in test_what_rows_do_not_hold_is_counted
def test_what_rows_do_not_hold_is_said_once_under_another_launcher(chats, folder, tmp_path):
    given = ["data=chat", f"data.path={chats}", f"data.tokenizer={folder}", "model.vocab_size=512", "train.steps=1"]
    done = train(*given, "data.validation_fraction=0", cwd=tmp_path, PLAIT_CACHE=str(tmp_path / "cache"))
    assert done.code == 0, done.err
    assert done.out.count("data: train.seq_len=32 is too short for some of 60 conversations") == 1


def fits(path, folder, seq_len):
    made = source(path, folder, validation_fraction=0)
    made.prepare(lambda line: None)
    try:
        made.check_length(seq_len=seq_len)
    except PlaitError:
        return False
    return True


PARTS = {"chat_template.jinja": CHATML, "tokenizer_config.json": json.dumps({"chat_template": CHATML})}


def bare_folder(folder, path):
    """The tokenizer of `folder` without a template."""
    path.mkdir()
    (path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return path


@pytest.mark.parametrize("name", PARTS)
def test_templates_are_utf8_whatever_the_locale(chats, folder, tmp_path, name):
    """The marks of DeepSeek's templates are not ASCII. A byte order mark, as Windows' editors write it, is no text."""
    marks = PARTS[name].replace("|", "｜")
    bare = bare_folder(folder, tmp_path / "bare")
    program = (
        "from plait_data.chat import Chat\n"
        f"Chat(path={str(chats)!r}, tokenizer={str(bare)!r}).check(seq_len=64, vocab_size=512)\n"
        f"print(ascii(Chat(path={str(chats)!r}, tokenizer={str(bare)!r})._template))"
    )
    for encoding, locale in (("utf-8", {"PYTHONCOERCECLOCALE": "0"}), ("utf-8-sig", {})):
        (bare / name).write_text(marks, encoding=encoding)
        env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", **locale}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", env=env)
        assert done.stdout == ascii(CHATML.replace("|", "｜")) + "\n", done.stderr


def test_it_is_tokenised_once_and_says_what_it_found(folder, tmp_path, said):
    path = written(tmp_path / "a.jsonl", [*CHATS, [{"role": "user", "content": "anybody here?"}]])
    one = source(path, folder)
    one.prepare(said.append)
    assert re.fullmatch(
        r"[\d,]+ tokens in 60 conversations, [\d,]+ of them to learn; left out 1 without an answer", said[-2]
    )
    said.clear()
    source(path.rename(tmp_path / "b.jsonl"), folder).prepare(said.append)
    assert not said
    others = [
        source(tmp_path / "b.jsonl", folder, **o) for o in ({"validation_fraction": 0.2}, {"eod_token": "<|im_end|>"})
    ]
    assert len({one.fingerprint(), *(other.fingerprint() for other in others)}) == 3
    (one.folder / "keys.bin").write_bytes(b"12345678")
    with pytest.raises(PlaitError, match="damaged or gone; run again"):
        one.check_length(seq_len=64)
    source(tmp_path / "b.jsonl", folder).prepare(said.append)
    one.check_length(seq_len=64)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 100))
def test_bins(sizes, room):
    sizes = np.array(sizes, np.int64)
    bins = pack(sizes, room)
    assert sorted(item for one in bins for item in one) == list(range(len(sizes)))
    filled = [int(sizes[one].sum()) for one in bins]
    assert all(0 < size <= room for size in filled)
    for item in (one[0] for one in bins[1:]):  # the largest of its bin, which it opened because no other had room
        earlier = [[each for each in one if (-sizes[each], each) < (-sizes[item], item)] for one in bins]
        assert all(int(sizes[one].sum()) + sizes[item] > room for one in earlier if one)
    assert sum(2 * size <= room for size in filled) <= 1  # two half empty ones would have been one


def test_a_folder_without_a_template_takes_a_given_one(chats, folder, tmp_path):
    bare = bare_folder(folder, tmp_path / "bare")
    (tmp_path / "own.jinja").write_text(CHATML)
    assert source(chats, bare, template=str(tmp_path / "own.jinja")).open(
        seq_len=64, seed=0, global_batch_size=1, dp=(0, 1)
    )


def test_checked_without_torch_or_transformers(chats, folder, tmp_path):
    program = (
        "import sys; from plait_data.chat import Chat\n"
        f"Chat(path={str(chats)!r}, tokenizer={str(folder)!r}).check(seq_len=64, vocab_size=512)\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(tmp_path))
    assert done.stdout == "[]\n", done.stderr


def test_files_that_are_not_json_lines_are_left_out_of_a_folder_and_said(
    folder: Path, tmp_path: Path, said: list[str]
) -> None:
    (tmp_path / "chats").mkdir()
    written(tmp_path / "chats/a.jsonl", CHATS)
    (tmp_path / "chats/README.md").write_text("about these chats")
    source(tmp_path / "chats", folder).prepare(said.append)
    assert said[0] == "left out 1 file(s) that are not JSON lines: README.md"
