"""The language part of models that take images too: text trains it, and an export is the whole model again."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from families import apart, keys_of, read, result
from grid import BOUND, UNDER
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from plait import PlaitError
from plait.checkpoint.export import export
from plait.checkpoint.init_from import read_weights
from plait.checkpoint.passed_on import passed_on
from plait.host import check, compose
from plait.parallel.initialize import initialise, materialise
from plait.parallel.state import shapes, tied_names
from plait.testing import raises_about
from plait_testing.widened import Widened
from plait_transformers import language
from plait_transformers.build import decoder

TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TOWER |= {"image_size": 16, "patch_size": 8}
FOLDED = {"intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
QWEN = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
WIDE = {"head_dim": 16, "hidden_size": 64, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
HEADS = {"head_dim": 8, "num_key_value_heads": 2}
SLOW = pytest.mark.slow
# family -> keys of its text, and of the rest
KINDS: dict[str, Any] = {
    "gemma3": ({}, {"vision_config": TOWER, "mm_tokens_per_image": 4}),
    "mistral3": ({"model_type": "mistral"}, {"vision_config": {**TOWER, "model_type": "pixtral", "head_dim": 8}}),
    "qwen3_vl": (WIDE, {"vision_config": {**QWEN, "deepstack_visual_indexes": [0], "out_hidden_size": 64}}),
    "qwen3_5": ({}, {"vision_config": QWEN}),
    "llama4": ({"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}, {"vision_config": {**TOWER, **FOLDED}}),
    "gemma4": ({}, {"vision_config": {**TOWER, "model_type": "gemma4_vision", **HEADS}}),
    "mllama": (
        {"model_type": "mllama_text_model"},
        {
            "vision_config": {
                **{"hidden_size": 16, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2},
                **{"intermediate_size": 16, "image_size": 16, "patch_size": 8, "vision_output_dim": 32},
                **{"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]},
            }
        },
    ),
    "llava": ({"model_type": "llama"}, {"vision_config": {**TOWER, "model_type": "clip_vision_model"}}),
}
MORE: dict[str, Any] = {  # whose files alone are tried
    "gemma4_unified": (
        {},
        {
            "vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16},
            "audio_config": {"audio_embed_dim": 16},
        },
    ),
    "got_ocr2": ({"model_type": "qwen2"}, {"vision_config": {**TOWER, "output_channels": 16, "mlp_dim": 16}}),
    "moss_transcribe_diarize": (
        {"model_type": "qwen3"},
        {"audio_config": {**TOWER, "num_mel_bins": 8, "max_source_positions": 16}},
    ),
    "qwen3_5_moe": ({}, {"vision_config": QWEN}),
}
EACH = [kind if kind in ("gemma3", "qwen3_vl") else pytest.param(kind, marks=SLOW) for kind in KINDS]


def keys(kind, **more):
    text, rest = (KINDS | MORE)[kind]
    known = text.get("model_type", f"{kind}_text")
    return {"model_type": kind, "text_config": {**keys_of(known), "model_type": known, **text, **more}, **rest}


def saved(path, kind, **more):
    """The whole model, with random weights, after transformers wrote it into the folder `path`."""
    from transformers import CONFIG_MAPPING

    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind].from_dict(keys(kind, **more))
    model = language.class_of_whole(config)._from_config(config)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor, 0.0, 0.3)
    model.save_pretrained(path)
    return model.eval()


def held(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def loaded(folder, dtype=torch.float32, **more):
    """The language part, with the weights of the folder. more: of `decoder`."""
    with torch.device("meta"):
        model = decoder(path=str(folder), **more)
    materialise(model, "cpu")
    initialise(model, model.spec(), seed=0)
    model.to(dtype)
    state = model.state_dict()
    read_weights(folder, {fqn: state[fqn] for fqn in shapes(model)}, tied_names(model), parts=model.weight_parts())
    return model.eval()


@pytest.mark.parametrize("kind", EACH)
def test_gradients_are_those_of_the_whole_model(kind, tmp_path):
    """In float64, parameter by parameter; the rest gets none of text."""
    theirs = saved(tmp_path, kind).double()
    ours, tokens = loaded(tmp_path, torch.float64), torch.randint(4, 60, (2, 12))
    with Widened():
        for logits in (ours(tokens), theirs(input_ids=tokens, use_cache=False).logits):
            cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    names, found = language.names_in_whole(theirs, ours), dict(ours.named_parameters())
    for param in (*found.values(), *theirs.parameters()):  # text does not enter layers that attend to images
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    whole = sum(float(p.grad.square().sum()) for p in found.values()) ** 0.5
    assert whole > 0
    compared = set()
    for fqn, param in theirs.named_parameters():
        own = language.in_part(fqn, names)
        if own not in found:  # of the rest, or the second name of a tied one
            assert own is not None or not param.grad.any(), fqn
            continue
        compared.add(own)
        error = float((found[own].grad - param.grad).norm()) / max(float(param.grad.norm()), 1e-3 * whole)
        assert error < BOUND, (fqn, error)
    assert compared == found.keys()


@pytest.mark.parametrize("kind", [*EACH, *(pytest.param(kind, marks=SLOW) for kind in MORE)])
def test_files_of_the_whole_are_read_and_written(kind, tmp_path):
    """And `from_pretrained` has of the export, without a missing or an unknown tensor, what was trained."""
    whole = saved(tmp_path / "theirs", kind)
    model, ours = read(tmp_path / "theirs")
    assert [fqn for fqn, tensor in ours.items() if tensor.isnan().any()] == []
    trained = {fqn: tensor + 1 for fqn, tensor in ours.items()}
    export(trained, tmp_path / "ours", is_writer=True, parts=model.weight_parts(), others=passed_on(model))
    there, here = held(tmp_path / "theirs"), held(tmp_path / "ours")
    assert here.keys() == there.keys()
    rest = {name for name in there if torch.equal(here[name], there[name])}
    assert rest == {*passed_on(model).names}
    assert len(rest) > 5
    assert all(torch.equal(here[name], there[name] + 1) for name in there.keys() - rest)
    for name, text in model.export_files().items():
        (tmp_path / "ours" / name).write_text(text)
    loaded, how = type(whole).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(how.values()), how
    names, before, after = language.names_in_whole(loaded, model), whole.state_dict(), loaded.state_dict()
    for fqn, tensor in after.items():
        own = language.in_part(fqn, names)
        assert torch.equal(tensor, trained[own] if own in trained else before[fqn]) or own in tied_names(model), fqn


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "tensor_parallel"])
@pytest.mark.parametrize("kind", ["qwen3_vl", "mistral3"])  # gemma3, llama4 and qwen3_5 are in the grid
def test_under_strategies(kind, strategy, plait_ranks):
    (one,) = plait_ranks.once(result, kind, {}, True, world=1)
    for answer in plait_ranks.run(result, kind, UNDER[strategy], True, world=2):
        error, name = apart(answer, one)
        assert error < BOUND, name


def overrides(folder, run, *more):
    sizes = ("train.seq_len=32", "train.local_batch_size=2", "train.steps=4", "validation.interval=0")
    return ["model=transformers", f"model.path={folder}", *sizes, "data.tokenizer=bytes", f"run.name={run}", *more]


def train(where, *given):
    command = [sys.executable, "-m", "plait", "train", *given]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_a_run_resumes_and_its_export_is_the_whole_model(kind, tmp_path):
    from transformers import AutoModelForImageTextToText

    folder = tmp_path / "theirs"
    saved(folder, kind, vocab_size=272)
    (folder / "preprocessor_config.json").write_text('{"size": 16}')
    two = ("strategy=[fsdp2]", "launch.nproc_per_node=2")
    told = train(tmp_path, *overrides(folder, "whole", *two))
    assert f"the language part of {kind} trains, on text; an export has the rest as it is in model.path" in told
    train(tmp_path, *overrides(folder, "again", *two, "train.steps=2"))
    train(tmp_path, *overrides(folder, "again", *two))
    there, here = held(folder), held(tmp_path / "runs" / "whole" / "export")
    again = held(tmp_path / "runs" / "again" / "export")
    assert there.keys() == here.keys() == again.keys()
    assert all(torch.equal(again[name], here[name]) for name in here)
    with torch.device("meta"):
        rest = {*passed_on(decoder(path=str(folder))).names}
    changed = {name for name in there if not torch.equal(here[name], there[name])}
    assert changed == there.keys() - rest
    exported = tmp_path / "runs" / "whole" / "export"
    assert (exported / "preprocessor_config.json").read_text() == '{"size": 16}'
    of_folder: Any = AutoModelForImageTextToText.from_pretrained
    theirs, how = of_folder(exported, output_loading_info=True)
    assert not any(how.values()), how
    tokens = torch.arange(4, 20)[None]
    with torch.no_grad():
        wanted = theirs.eval()(input_ids=tokens).logits
        torch.testing.assert_close(loaded(exported)(tokens), wanted, rtol=1e-5, atol=1e-5)
    kept = of_folder(folder).config.to_dict()
    differ = {key for key, value in theirs.config.to_dict().items() if kept.get(key) != value}
    assert differ <= {"_name_or_path"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("theirs")
    saved(path, "gemma3", vocab_size=272)
    return path


def test_a_folder_that_lacks_a_part_of_the_rest_is_refused_before_ranks_start(folder, tmp_path):
    there = held(folder)
    lost = next(name for name in there if "vision" in name)
    save_file({name: tensor for name, tensor in there.items() if name != lost}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with raises_about("passed_on", lost, "a folder with all weights of the model"):
        check(compose(overrides(tmp_path, "a")), 1)


def test_adapters_alone_are_refused(folder):
    """peft would look for the modules that they name in the whole, where these have other names."""
    given = [*overrides(folder, "a"), "strategy=[lora]"]
    with raises_about("strategy.lora.merge", False, (True,)):
        check(compose(given), 1)
    check(compose([*given, "strategy.lora.merge=true"]), 1)


def test_keys_of_the_language_part_stand_over_those_of_the_folder(folder):
    with torch.device("meta"):
        model = decoder(path=str(folder), config={"text_config": {"num_hidden_layers": 1}}, weights="init")
    assert len(model.model.layers) == 1
    assert model.config.hidden_size == 32
    assert "text_config.layer_types of config.json is cut from 2 layers to 1" in model.said[0]
    assert json.loads(model.export_files()["config.json"])["text_config"]["num_hidden_layers"] == 1


def test_without_weights_of_the_rest_the_part_is_alone():
    with torch.device("meta"):
        model = decoder(config=keys("gemma3"))
    assert model.passed_on() is None
    assert model.said == [
        "model: the language part of gemma3 trains, on text; an export lacks the rest, as model.path has no weights of "
        "it: from_pretrained draws them"
    ]


REFUSED = {  # what is said -> the keys
    "model_type=git, which is not a decoder or an encoder of text, and has no part that": {"model_type": "git"},
    "model_type=layoutxlm, which is not a decoder": {"model_type": "layoutxlm"},  # it has no model of its own
    "blip-2 on text: without other inputs it fails with TypeError": {"model_type": "blip-2"},
    "are not those of the whole": {"model_type": "cohere2_vision", "text_config": keys_of("cohere2")},
    "unknown key model.config.num_hidden_layers: .* no such key; its text_config has one": {
        "model_type": "gemma3",
        "num_hidden_layers": 2,
    },
    "unknown key model.config.text_config.layers: a configuration of gemma3_text has no such key": {
        "model_type": "gemma3",
        "text_config": {"layers": 2},
    },
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_trained_is_one_sentence(said):
    with pytest.raises(PlaitError, match=said) as caught, torch.device("meta"):
        decoder(config=REFUSED[said])
    assert "\n" not in str(caught.value)
