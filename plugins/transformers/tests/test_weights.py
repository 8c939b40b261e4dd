"""Weights of a folder of transformers: into a run, and out again so that `from_pretrained` loads them."""

import json
import math
import subprocess
import sys

import pytest
import test_language
import torch
from families import keys_of, read
from grid import PAGE, told
from safetensors.torch import load_file, save_file

from plait.checkpoint.export import export
from plait.checkpoint.init_from import check_weights, read_weights
from plait.contract.errors import PlaitError
from plait.host import check, compose, export_weights, weights
from plait.parallel.initialize import initialise, materialise
from plait.parallel.state import shapes, tied_names
from plait.testing import raises_about
from plait_transformers.build import decoder
from plait_transformers.encoders import is_encoder

TOKENS = torch.arange(4, 20)[None]


def saved(path, kind, **more):
    """A model of random weights of transformers, after it wrote itself into the folder `path`."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    config = AutoConfig.for_model(**{**keys_of(kind), **more})
    config = type(config).from_dict(config.to_dict())  # as read from a file: dbrx derives a width from the others there
    model = (AutoModelForMaskedLM if is_encoder(config) else AutoModelForCausalLM).from_config(config)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor, 0.0, 0.3)
    model.save_pretrained(path, max_shard_size="20KB")
    return model


def held(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module", params=["qwen2"])
def folder(request, tmp_path_factory):
    """Tied embeddings, more words than the small models of the other tests, and a tokenizer's file."""
    path = tmp_path_factory.mktemp("theirs")
    saved(path, request.param, vocab_size=272, tie_word_embeddings=True, attention_dropout=0.25)
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {}}))
    return path


def overrides(folder, run, *more):
    sizes = (
        "train.seq_len=32",
        "train.local_batch_size=2",
        "train.steps=1",
        "validation.interval=0",
        "data.tokenizer=bytes",
        f"run.name={run}",
    )
    return ["model=transformers", f"model.path={folder}", *sizes, *more]


def test_a_run_starts_from_the_folder_unless_told_otherwise(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = check(compose(overrides(folder, "a")), 1)
    assert named.config.checkpoint.init_from == str(folder)
    assert check(compose(overrides(folder, "a", "model.weights=init")), 1).config.checkpoint.init_from is None
    other = check(compose(overrides(folder, "a", "checkpoint.init_from=other")), 1)
    assert other.config.checkpoint.init_from == "other"


def test_another_choice_of_weights_is_refused(folder):
    with pytest.raises(PlaitError, match=r"model\.weights is zeros; it must be files or init"):
        check(compose(overrides(folder, "a", "model.weights=zeros")), 1)


SLOW = pytest.mark.slow
FAMILIES = {"mixtral", *told(PAGE)}  # a mixture, whose files have other names than the parameters; and all others


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == "mixtral" else SLOW) for k in sorted(FAMILIES)])
def test_files_of_a_family_are_read_and_written(kind, tmp_path):
    if "text_config" in keys_of(kind):
        assert kind in test_language.KINDS | test_language.MORE
        pytest.skip("a model with more inputs than text: its files are in test_language.py")
    written = saved(tmp_path / "theirs", kind)
    theirs = written.state_dict()
    model, ours = read(tmp_path / "theirs")
    assert [fqn for fqn, tensor in ours.items() if not torch.equal(tensor, theirs[fqn])] == []
    export(ours, tmp_path / "ours", is_writer=True, parts=model.weight_parts())
    there, here = held(tmp_path / "theirs"), held(tmp_path / "ours")
    there = {name if name in here else tied_names(model).get(name, name): tensor for name, tensor in there.items()}
    assert here.keys() == there.keys()  # of a tied matrix, transformers may write the other name
    assert [name for name in here if not torch.equal(here[name], there[name])] == []
    save_file({fqn: tensor.contiguous() for fqn, tensor in ours.items()}, tmp_path / "own.safetensors")
    with weights.read(tmp_path / "own.safetensors") as source:
        export_weights(model, source, tmp_path / "converted")
    converted = held(tmp_path / "converted")
    assert converted.keys() == here.keys()
    assert [name for name in here if not torch.equal(here[name], converted[name])] == []
    for name, text in model.export_files().items():
        (tmp_path / "ours" / name).write_text(text)
        assert (tmp_path / "converted" / name).read_text() == text
    loaded, told = type(written).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert {what: names for what, names in told.items() if names} == {}
    again, own = loaded.state_dict(), type(written).from_pretrained(tmp_path / "theirs").state_dict()
    assert [name for name in own if not torch.equal(again[name], own[name])] == []


def test_weights_of_another_model_are_not_exported(tmp_path):
    saved(tmp_path / "theirs", "llama")
    model, ours = read(tmp_path / "theirs")
    for change, said in (({"adapter": torch.ones(2)}, "'adapter', which"), ({}, "no 'lm_head.weight'")):
        given = {fqn: tensor.contiguous() for fqn, tensor in {**ours, **change}.items() if change or "head" not in fqn}
        save_file(given, tmp_path / "own.safetensors")
        with weights.read(tmp_path / "own.safetensors") as source, pytest.raises(PlaitError, match=said):
            export_weights(model, source, tmp_path / "converted")
        assert not (tmp_path / "converted").exists()


def test_a_folder_of_another_size_names_a_tensor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "theirs", "mixtral", vocab_size=272)
    fewer = check(compose(overrides(tmp_path / "theirs", "a", "+model.config={num_local_experts: 2}")), 1)
    with pytest.raises(PlaitError, match=r"'model\.layers\.0\.block_sparse_moe\.gate\.weight' has shape \(4, 32\)"):
        check_weights(tmp_path / "theirs", fewer.shapes, fewer.ties, fewer.parts)


def test_a_head_that_the_config_calls_tied_is_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "theirs", "llama", vocab_size=272, tie_word_embeddings=False)
    file = tmp_path / "theirs" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    tied = check(compose(overrides(tmp_path / "theirs", "a")), 1)
    with pytest.raises(PlaitError, match=r"'model\.embed_tokens\.weight' and 'lm_head\.weight' differ in .*theirs"):
        check_weights(tmp_path / "theirs", tied.shapes, tied.ties, tied.parts)
    advice = "+model.config={tie_word_embeddings: false}"
    untied = check(compose(overrides(tmp_path / "theirs", "a", advice)), 1)
    check_weights(tmp_path / "theirs", untied.shapes, untied.ties, untied.parts)


def test_a_folder_of_another_family_names_a_tensor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "theirs", "llama", vocab_size=272)
    file = tmp_path / "theirs" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "qwen3"}))
    other = check(compose(overrides(tmp_path / "theirs", "a")), 1)
    lacking = r"are of another model: it lacks 'model\.layers\.0\.self_attn\.q_norm\.weight'[^\n]*\Z"
    with pytest.raises(PlaitError, match=lacking):
        check_weights(tmp_path / "theirs", other.shapes, other.ties, other.parts)


def test_files_that_mix_parameters_are_refused_before_a_run(tmp_path, monkeypatch):
    """Then neither would its export be one of the family's."""
    import transformers.core_model_loading as theirs

    saved(tmp_path / "theirs", "llama", vocab_size=272)
    mixed = lambda model, state: {**state, "lm_head.weight": state["lm_head.weight"] + 1}  # noqa: E731
    monkeypatch.setattr(theirs, "revert_weight_conversion", mixed)
    with raises_about("model.path", "lm_head.weight"):
        check(compose(overrides(tmp_path / "theirs", "a")), 1)


def loaded(folder):
    """Plait's model with the weights of the folder."""
    with torch.device("meta"):
        model = decoder(path=str(folder))
    materialise(model, "cpu")
    initialise(model, model.spec(), seed=0)
    state = model.state_dict()
    held = {fqn: state[fqn] for fqn in shapes(model)}
    read_weights(folder, held, tied_names(model), parts=model.weight_parts())
    return model.eval()


@SLOW
@pytest.mark.parametrize(
    ("folder", "strategies"),
    [("qwen2", "[]"), ("qwen2", "[tensor_parallel,fsdp2]"), ("mixtral", "[tensor_parallel,fsdp2]")],
    indirect=["folder"],
)
def test_there_and_back_every_tensor_is_equal(strategies, folder, tmp_path):
    """A run that trains with a rate of 0 exports what it read; transformers computes the same with both."""
    from transformers import AutoModelForCausalLM

    ranks = 4 if "tensor" in strategies else 1
    still = ("optimizer.lr=0", "optimizer.weight_decay=0", f"launch.nproc_per_node={ranks}", f"strategy={strategies}")
    command = [sys.executable, "-m", "plait", "train", *overrides(folder, "there", *still)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    exported = tmp_path / "runs" / "there" / "export"
    theirs, ours = held(folder), load_file(exported / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not (exported / "tokenizer.json").exists()  # bytes have none, and the folder's was not used
    before, after = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (folder, exported))
    with torch.no_grad():
        wanted = after(TOKENS).logits
        assert torch.equal(before(TOKENS).logits, wanted)
        torch.testing.assert_close(loaded(exported)(TOKENS), wanted, rtol=1e-5, atol=1e-5)
    kept = before.config.to_dict()
    assert {key for key, value in after.config.to_dict().items() if kept.get(key) != value} <= {"_name_or_path"}
    assert math.isclose(after.config.attention_dropout, 0.25)
