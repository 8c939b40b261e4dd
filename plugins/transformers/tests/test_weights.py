"""Weights of a folder of transformers: into a run, and out again so that `from_pretrained` loads them."""

import json
import math
import subprocess
import sys

import pytest
import torch
from families import keys_of
from safetensors.torch import load_file

from plait.contract.errors import PlaitError
from plait.launch.check import check
from plait.launch.compose import resolve

TOKENS = torch.arange(4, 20)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A qwen2 of random weights with tied embeddings, as save_pretrained writes it, and a tokenizer's file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path_factory.mktemp("theirs")
    keys = {**keys_of("qwen2"), "vocab_size": 272, "tie_word_embeddings": True, "attention_dropout": 0.25}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(path, max_shard_size="20KB")
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {}}))
    return path


def overrides(folder, run, *more):
    sizes = (
        "train.seq_len=32",
        "train.local_batch_size=2",
        "train.steps=1",
        "validation.interval=0",
        f"run.name={run}",
    )
    return ["model=transformers", f"model.path={folder}", *sizes, *more]


def test_a_run_starts_from_the_folder_unless_told_otherwise(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = check(resolve(overrides(folder, "a")), 1)
    assert named.config.node["checkpoint"]["init_from"] == str(folder)
    assert check(resolve(overrides(folder, "a", "model.weights=init")), 1).config.checkpoint.init_from is None
    other = check(resolve(overrides(folder, "a", "checkpoint.init_from=other")), 1)
    assert other.config.checkpoint.init_from == "other"


def test_another_choice_of_weights_is_refused(folder):
    with pytest.raises(PlaitError, match=r"model\.weights is zeros; it must be files or init"):
        check(resolve(overrides(folder, "a", "model.weights=zeros")), 1)


@pytest.mark.slow
@pytest.mark.parametrize("strategies", ["[]", "[tensor_parallel,fsdp2]"])
def test_there_and_back_every_tensor_is_equal(strategies, folder, tmp_path):
    """A run that trains with a rate of 0 exports what it read; transformers computes the same with both."""
    from transformers import AutoModelForCausalLM

    ranks = 4 if "tensor" in strategies else 1
    still = ("optimizer.lr=0", "optimizer.weight_decay=0", f"launch.nproc_per_node={ranks}", f"strategy={strategies}")
    command = [sys.executable, "-m", "plait", "train", *overrides(folder, "there", *still)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    exported = tmp_path / "runs" / "there" / "export"
    theirs = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    ours = load_file(exported / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (exported / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    before, after = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (folder, exported))
    with torch.no_grad():
        assert torch.equal(before(TOKENS).logits, after(TOKENS).logits)
    kept = before.config.to_dict()
    assert {key for key, value in after.config.to_dict().items() if kept.get(key) != value} <= {"_name_or_path"}
    assert math.isclose(after.config.attention_dropout, 0.25)
