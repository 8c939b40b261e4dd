"""What lies beside exported weights is the tokenizer and the template that the data was read with."""

import json

import pytest

from plait.data.tokenizer_files import Used, files_of, said_of_export, used_by
from plait_data.chat import Chat
from plait_data.text import Text
from tests.helpers.chats import CHATML, CHATS, tokenizer_in, written

IDS = {"eos_token_id": 7, "bos_token_id": 1, "pad_token_id": 2, "vocab_size": 999}


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    return tokenizer_in(tmp_path_factory.mktemp("mine"))


@pytest.fixture
def model(tmp_path):
    """A model's own files, with another tokenizer."""
    own = {"tokenizer.json": "{}", "merges.txt": "a b", "chat_template.jinja": "theirs", "tokenizer_config.json": "{}"}
    return {**own, "config.json": json.dumps(IDS), "generation_config.json": json.dumps({"eos_token_id": [7, 8]})}


def beside(model, source, **data):
    return used_by(source, files_of(data)).beside(model)


def test_another_tokenizer_replaces_all_files_of_the_models(mine, model):
    found = beside(model, Text(path=str(mine), tokenizer=str(mine)), tokenizer=str(mine))
    assert found["tokenizer.json"] == (mine / "tokenizer.json").read_text()
    assert "merges.txt" not in found
    assert found["chat_template.jinja"] == CHATML
    end = 0  # <|endoftext|>
    assert json.loads(found["config.json"]) == {**IDS, "eos_token_id": end, "bos_token_id": None, "pad_token_id": None}
    assert json.loads(found["generation_config.json"])["eos_token_id"] == end


@pytest.mark.parametrize("form", ["folder", "tokenizer.json", "another name"])
def test_a_tokenizers_file(form, mine, tmp_path):
    name = mine if form == "folder" else mine / "tokenizer.json"
    if form == "another name":
        name = tmp_path / "bpe.json"
        name.write_text((mine / "tokenizer.json").read_text())
    found = files_of({"tokenizer": str(name)})
    assert found["tokenizer.json"] == (mine / "tokenizer.json").read_text()
    assert ("tokenizer_config.json" in found) == (form != "another name")


def test_a_given_template_is_the_only_one(mine, tmp_path):
    config = json.loads((mine / "tokenizer_config.json").read_text())
    folder = tmp_path / "both"
    folder.mkdir()
    (folder / "tokenizer.json").write_text((mine / "tokenizer.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "old"}))
    (folder / "chat_template.jinja").write_text("old")
    (tmp_path / "t.jinja").write_text("new ｜")
    found = files_of({"tokenizer": str(folder), "template": str(tmp_path / "t.jinja")})
    assert found["chat_template.jinja"] == "new ｜"
    assert json.loads(found["tokenizer_config.json"]) == config
    assert found["tokenizer_config.json"].startswith('{\n  "'), "a key a line, as transformers writes it"


def test_generation_stops_at_what_ends_an_answer(mine, tmp_path):
    """The model's own tokenizer: its ids stay, and the token with which the template ends an answer is added."""
    data = {"tokenizer": str(mine), "path": str(written(tmp_path / "c.jsonl", CHATS))}
    own = {**(files_of(data) or {}), "config.json": json.dumps(IDS), "generation_config.json": "{}"}
    found = beside(own, Chat(**data), **data)
    assert json.loads(found["config.json"]) == {**IDS, "eos_token_id": [0, 2, 7]}
    assert json.loads(found["generation_config.json"]) == {"eos_token_id": [0, 2]}


def test_ids_that_fit_leave_a_file_as_it_is(mine):
    data = {"tokenizer": str(mine)}
    own = {**(files_of(data) or {}), "config.json": '{"eos_token_id": [5, 0]}'}
    assert beside(own, Text(path="none", **data), **data) == own


def test_bytes_have_no_file_and_a_source_may_have_no_tokenizer(model):
    assert set(Used({}).beside(model)) == {"config.json", "generation_config.json"}
    assert used_by(None, files_of({"_target_": "mine"})) is None


def test_the_user_is_told_what_differs_from_the_models(mine):
    class Model:
        tokenizer_from, vocab_size = str(mine), 512

    def said(**data):
        return said_of_export(data, Model, 400)

    assert said(tokenizer=str(mine)) is said(tokenizer=str(mine / "tokenizer.json")) is None
    assert said(tokenizer="bytes").startswith("export: no tokenizer, because data.tokenizer=bytes has no file")
    other = "export: the tokenizer is data.tokenizer=b, not that of "
    assert said(tokenizer="b").startswith(other)
    assert said(tokenizer="b").endswith("it has 400 tokens, and the model's vocabulary 512")
    assert said(tokenizer=str(mine), template="t") == "export: the chat template is data.template=t"
