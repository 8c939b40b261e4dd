"""The two commands of plait-transformers' page in an environment of wheels: fine-tune a folder, and test it."""

import shlex

import pytest
import torch
from safetensors.torch import load_file

from tests.docs.pages import SHORT, blocks
from tests.helpers.chats import CHATS, VOCAB, tokenizer_in, written
from tests.helpers.commands import rows
from tests.install.environments import ROOT, clean_environment

PAGE = ROOT / "plugins" / "transformers" / "README.md"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def command(about, folder):
    """The one command of the page that has `about`, with `folder` in the place of FOLDER."""
    lines = [line for block in blocks(PAGE) for line in block.text.splitlines() if about in line]
    (line,) = lines
    return shlex.split(line.replace("FOLDER", str(folder)))


def test_fine_tune_a_folder_and_test_it(wheels, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).save_pretrained(tmp_path / "model")
    folder = tokenizer_in(tmp_path / "model")
    written(tmp_path / "chats.jsonl", CHATS)
    clean = clean_environment(tmp_path / "venv", wheels, "plait[chat,testing]", "plait-transformers[test]")

    clean.run(*command("run.name=tuned", folder), *SHORT, "train.epochs=null", cwd=tmp_path)
    assert len(rows(tmp_path / "runs" / "tuned")) == 2
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "runs" / "tuned" / "export"))
    assert before.keys() == after.keys()
    assert not all(torch.equal(before[name], after[name]) for name in before)

    said = clean.run(*command("plait verify", folder), cwd=tmp_path).stdout
    assert said.endswith("all agree\n")
    assert "4 ranks" in said
