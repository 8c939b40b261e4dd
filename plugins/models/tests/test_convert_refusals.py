"""What `plait convert` refuses: one sentence each, and nothing on the disk is harmed."""

import json

import pytest
import torch
from safetensors.torch import save_file

from plait.contract.errors import PlaitError
from plait_models.convert import convert, to_hf
from plait_testing.models import moe, qk_norm
from plugins.models.tests.converting import MODELS, real, state_of, written

EXPERT = "model.layers.0.mlp.experts"
GATE, NORM = "model.layers.0.mlp.gate.weight", "model.layers.2.input_layernorm.weight"
PLACE = "which the model has no place for"


@pytest.mark.parametrize(
    ("gone", "new", "sentence"),
    [
        ("model.norm.weight", {}, "a lacks 'model.norm.weight'"),
        (f"{EXPERT}.5.up_proj.weight", {}, f"a lacks '{EXPERT}.5.up_"),
        (GATE, {f"{GATE}s": torch.ones(8, 32)}, f"a lacks '{GATE}'; did you mean '{GATE}s'?"),
        (None, {NORM: torch.ones(32)}, f"a has '{NORM}', {PLACE}"),
        (None, {f"{EXPERT}.8.up_proj.weight": torch.ones(16, 32)}, f"a has '{EXPERT}.8.up_proj.weight', {PLACE}"),
        (
            *(None, {f"{EXPERT}.7.up_proj.weight": torch.ones(16, 33)}),
            f"'{EXPERT}.7.up_proj.weight' has shape (16, 33) in a, and (16, 32) in the model",
        ),
        *(
            (None, {"lm_head.weight": torch.ones(64, 32, dtype=dtype)}, f"'lm_head.weight' {what}, quantised: Plait ")
            for dtype, what in ((torch.float8_e4m3fn, "in a is of F8_E4M3"), (torch.int8, "of a is of int8"))
        ),
    ],
)
def test_other_tensors_than_the_models(gone, new, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = real(MODELS["qwen3 experts"])
    there = {name: tensor.clone() for name, tensor in to_hf(model).items() if name != gone}
    (tmp_path / "a").mkdir()
    save_file(there | new, "a/model.safetensors")
    with pytest.raises(PlaitError) as error:
        convert(model, "a", "b", "plait")
    assert str(error.value).startswith(sentence)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_other_tensors_than_ours(tmp_path):
    model = real(qk_norm)
    state = state_of(model)
    save_file({n: t for n, t in state.items() if n != "norm.weight"}, tmp_path / "lacks.safetensors")
    save_file(state | {"extra": torch.ones(1)}, tmp_path / "extra.safetensors")
    save_file(state | {"norm.weight": torch.ones(33)}, tmp_path / "shape.safetensors")
    save_file(to_hf(model), tmp_path / "done.safetensors")
    for name, words in {
        "lacks": "lacks 'norm.weight'",
        "extra": "has 'extra', which the model has no place for",
        "shape": r"'norm.weight' has shape \(33,\) in .*, and \(32,\) in the model",
        "done": "is already in that form: it has 'model.embed_tokens.weight'",
    }.items():
        with pytest.raises(PlaitError, match=words):
            convert(model, tmp_path / f"{name}.safetensors", tmp_path / "b", "hf")
        assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("to", ["hf", "plait"])
def test_two_values_of_a_tied_parameter(to, tmp_path):
    model, names = real(MODELS["llama3 tied"]), ("tok_embeddings.weight", "output.weight")
    state = state_of(model)
    if to == "plait":
        state, names = to_hf(model), ("model.embed_tokens.weight", "lm_head.weight")
    for change, file in ((0, "same"), (1, "other")):
        save_file(state | {names[1]: state[names[0]] + change}, tmp_path / f"{file}.safetensors")
    convert(model, tmp_path / "same.safetensors", tmp_path / "b", to)
    with pytest.raises(PlaitError, match=rf"^'{names[0]}' and '{names[1]}' differ in .*, but the model ties them"):
        convert(model, tmp_path / "other.safetensors", tmp_path / "c", to)
    assert not (tmp_path / "c").exists()


def test_a_bias_that_was_learned_has_no_place_in_qwens_form():
    model = real(MODELS["qwen3 experts"])
    model.layers["1"].feed_forward.router.counts.fill_(3)  # what a step counted may go
    to_hf(model)
    model.layers["1"].feed_forward.router.bias[2] = 0.001
    with pytest.raises(PlaitError, match=r"^'layers.1.feed_forward.router.bias' .* is not zero, .* no place for it"):
        to_hf(model)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"rope_theta": 5.0}, "says rope_theta=5.0, but the model has 1000000.0: choose another model="),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, "says rope_theta=5.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "says rope_scaling={"),
        ({"model_type": "llama"}, 'says model_type="llama", but the model has "qwen3_moe"'),
        ({"norm_topk_prob": False}, "says norm_topk_prob=false, but the model has true"),
        ({"num_experts_per_tok": 4}, "says num_experts_per_tok=4, but the model has 2"),
        ({"attention_bias": True}, "says attention_bias=true, but the model has false"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is of a quantised model"),
        ("[]", "cannot be read: it holds no object"),
        ("{", "cannot be read: "),
        ("[" * 100_000, "cannot be read: "),
        ({"rope_scaling": 4}, "does not describe RoPE in a way that Plait knows: "),
        ({"rope_scaling": {"type": "yarn"}}, "does not describe RoPE in a way that Plait knows: KeyError('factor')"),
        ({"rope_scaling": {"type": "yarn", "factor": "x"}}, "does not describe RoPE in a way that Plait knows: "),
    ],
)
def test_a_config_of_another_model(config, sentence, tmp_path):
    make = MODELS["qwen3 experts"]
    model = written(make, tmp_path / "a")
    convert(model, tmp_path / "a", tmp_path / "b", "hf")
    (tmp_path / "b" / "SHA256SUMS").unlink()  # a folder that others wrote has none
    path = tmp_path / "b" / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(PlaitError) as error:
        convert(model, tmp_path / "b", tmp_path / "c", "plait")
    assert str(error.value).startswith(f"{path} {sentence}")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"group_top": 1}, "model.group_top is 1, but "),
        ({"score": "softmax", "group_top": 1}, "model.norm_weights is true; "),
        ({"n_shared_experts": 0}, "model.n_shared_experts is 0, but "),
        ({"n_dense_layers": 3}, "Hugging Face's form of DeepSeek has experts in a block, and model.n_dense_layers"),
        ({"norm_eps": 1e-5}, "model.norm_eps is 1e-05, but "),
    ],
)
def test_options_that_no_form_has(changes, sentence):
    with pytest.raises(PlaitError) as error:
        to_hf(real(lambda: moe(**changes)))
    assert str(error.value).startswith(sentence)


def test_nothing_on_the_disk_is_harmed(tmp_path):
    model = written(qk_norm, tmp_path / "a")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    (tmp_path / "left.tmp").mkdir()

    def interrupt(file, done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    for target, words in {
        "there": "there exists already",
        "a": "a exists already",
        "left": "left.tmp is in the way",
    }.items():
        with pytest.raises(PlaitError, match=words):
            convert(model, tmp_path / "a", tmp_path / target, "hf")
    with pytest.raises(PlaitError, match="no such file or folder"):
        convert(model, tmp_path / "none", tmp_path / "b", "hf")
    with pytest.raises(PlaitError, match="cannot be written: a file is where a folder should be"):
        convert(model, tmp_path / "a", tmp_path / "a" / "model.safetensors" / "b", "hf")
    with pytest.raises(KeyboardInterrupt):
        convert(model, tmp_path / "a", tmp_path / "b", "hf", max_shard_bytes=9000, progress=interrupt)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "left.tmp", "mine", "model.safetensors", "there"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("a", "b"), "plait convert needs --to: plait convert SOURCE TARGET --to hf|plait [overrides]"),
        (("a", "b", "--to"), "--to needs a value: --to hf|plait"),
        (("a", "b", "--to", "gguf"), "--to is 'gguf'; it must be hf or plait"),
        (
            ("a", "--to", "hf", "model=qwen3_debug"),
            "plait convert takes SOURCE and TARGET first, then overrides such as",
        ),
        (("a", "b", "--to", "hf", "-m"), "plait convert has no option -m; it takes SOURCE, "),
        (("a", "b", "--to", "hf"), "there are no weights at a: no such file or folder"),
        (("a", "b", "--to", "hf", "model=qwen4"), "model=qwen4 does not exist; available: "),
    ],
)
def test_the_command_explains_mistakes(plait_project, arguments, sentence, tmp_path):
    done = plait_project("convert", *arguments)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"plait: {sentence}")
    assert not list(tmp_path.iterdir())


def in_their_form(folder):
    model = written(qk_norm, folder.with_name("ours"))
    convert(model, folder.with_name("ours"), folder, "hf")
    return model


def test_what_appears_meanwhile_is_left_alone(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    model = in_their_form(source)

    def another_writes(file, done, total):
        target.mkdir(exist_ok=True)
        (target / "precious.txt").write_text("precious")

    with pytest.raises(PlaitError, match="target appeared while it was being written; it is left as it is"):
        convert(model, source, target, "plait", progress=another_writes)
    assert [p.name for p in target.iterdir()] == ["precious.txt"]
    assert not (tmp_path / "target.tmp").exists()


def test_another_conversions_files_are_left_alone(tmp_path, monkeypatch):
    """It begins after this one has looked, and before this one makes its folder."""
    from plait.checkpoint import weights

    source, partial = tmp_path / "source", tmp_path / "target.tmp"
    model = in_their_form(source)
    real_split = weights.split

    def meanwhile(*arguments):
        partial.mkdir()
        (partial / "model.safetensors").write_text("half")
        return real_split(*arguments)

    monkeypatch.setattr(weights, "split", meanwhile)
    with pytest.raises(PlaitError, match="cannot be written: something else has that name"):
        convert(model, source, tmp_path / "target", "plait")
    assert (partial / "model.safetensors").read_text() == "half"


def test_an_index_that_names_files_elsewhere(tmp_path):
    model = in_their_form(tmp_path / "a")
    (tmp_path / "b").mkdir()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "../a/model.safetensors"}}
    (tmp_path / "b" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PlaitError, match=r"names '\.\./a/model\.safetensors', which is not in its folder"):
        convert(model, tmp_path / "b", tmp_path / "c", "plait")


def test_others_may_read_the_files_if_they_may_read_others(tmp_path):
    convert(in_their_form(tmp_path / "a"), tmp_path / "a", tmp_path / "b", "plait")
    (tmp_path / "plain").touch()
    assert (tmp_path / "b" / "model.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
