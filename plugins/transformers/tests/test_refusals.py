"""What cannot be trained is refused in one sentence that names the key."""

import json
import re
from typing import Any

import pytest
import torch
from families import keys_of

from plait import PlaitError
from plait.host import check, compose
from plait.testing import raises_about
from plait_transformers import proof
from plait_transformers.build import decoder
from plait_transformers.source import _with_layers, read_config


def build(**options):
    with torch.device("meta"):
        return decoder(**options)


def folder(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    return str(tmp_path)


LLAMA = keys_of("llama")
FLOATING, OWN_NAME = "a folder of weights in floating point", "a folder without transformers_weights"


@pytest.mark.parametrize(
    ("config", "said", "fits"),
    [
        (None, "has no config.json", ()),
        ("{", "cannot be read", ()),
        ("[]", "holds no object", ()),
        ("{}", "has no model_type", ()),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}', "does not run the code of a folder", ()),
        ('{"model_type": "t5"}', "not a decoder or an encoder of text, and has no part that", ()),
        ({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, "", FLOATING),
        ({**LLAMA, "transformers_weights": "best.safetensors"}, "", OWN_NAME),
    ],
)
def test_folders_that_hold_no_model(config, said, fits, tmp_path):
    if config is not None:
        folder(tmp_path, config if isinstance(config, str) else json.dumps(config))
    with raises_about("model.path", str(tmp_path), fits) as caught:
        build(path=str(tmp_path))
    assert said in str(caught.value)


@pytest.mark.parametrize("given", [{}, {"num_hidden_layers": 2}])
def test_neither_a_folder_nor_a_kind_of_model(given):
    with raises_about("model.path", None, "a folder of Hugging Face's") as caught:
        build(config=given)
    assert "model=transformers takes model.path" in str(caught.value)


@pytest.mark.parametrize("path", ["nowhere", "Qwen/Qwen3-0.6B", "../Qwen/Qwen3-0.6B", "/nowhere/at-all"])
def test_a_folder_that_is_none(path):
    """A name as the hub's models have is answered with the command that fetches one."""
    with raises_about("model.path", path) as caught:
        build(path=path)
    fetch = "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"
    assert str(caught.value).endswith(fetch) == (path == "Qwen/Qwen3-0.6B")
    assert ("hf download" in str(caught.value)) == (path == "Qwen/Qwen3-0.6B")


def test_what_a_folder_says_of_single_layers_is_cut_with_them(tmp_path):
    own = {"0": {"head_dim": 8}, "3": {"head_dim": 16}}
    stored = {"num_hidden_layers": 4, "per_layer_config": own, "id2label": {"0": "a", "1": "b"}}
    said = list[str]()
    cut = _with_layers(stored, {"num_hidden_layers": 2}, said.append)
    assert cut == {**stored, "per_layer_config": {"0": {"head_dim": 8}}}
    assert len(said) == 1


UNKNOWN = ("bert",)  # whose keys are their own
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
DRAFTER = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
CONFIGS: list[tuple[str, dict[str, Any], str]] = [  # family, keys beside those of its small model, what is said
    ("bert", {"architectures": ["BertLMHeadModel"]}, "tokens of this bert see later ones"),
    ("hrm_text", {}, "cannot train hrm_text: it mixes tokens outside attention and feed-forward"),
    ("llama", {"rope_parameters": DYNAMIC}, "rope_type=dynamic"),
    ("llama", {"layers": 3}, r"unknown key model\.config\.layers: a configuration of llama has no such key"),
    # what transformers raises
    ("cohere_compass_text", {}, "cohere_compass_text: .*KeyError: 'full_attention'"),
    (
        "gemma4_text",
        {"num_kv_shared_layers": 1},
        "cannot build gemma4_text: transformers ends with ValueError",
    ),  # as it does in transformers
    ("dots1", {"n_shared_experts": None}, "dots1.*NoneType"),
    ("mamba2", {"num_heads": 4}, "is not a configuration of mamba2: .*ValueError"),
    ("dbrx", {"attn_config": {}}, "cannot build dbrx: transformers ends with AttributeError"),
    ("phimoe", {}, "cannot train phimoe: .* router_jitter_noise at 0, .* changes what is computed in evaluation too"),
    ("fuyu", {}, "cannot train fuyu: its configuration has no num_hidden_layers"),
    ("gemma4_assistant", {}, "is not a configuration of gemma4_assistant: .*hidden_size_per_layer_input must be 0"),
    ("gemma4_assistant", {"text_config": DRAFTER, "layers": 3}, r"unknown key model\.config\.layers"),
]


@pytest.mark.parametrize(("kind", "more", "said"), CONFIGS)
def test_what_cannot_be_trained_is_one_sentence(kind, more, said):
    own = {"model_type": kind, "num_hidden_layers": 2} if kind in UNKNOWN else keys_of(kind)
    with pytest.raises(PlaitError, match=said) as caught:
        build(config={**own, **more}).spec()
    assert "\n" not in str(caught.value)


def test_fewer_layers_than_a_folder_describes_one_by_one(tmp_path):
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    path = folder(tmp_path, json.dumps({**keys_of("qwen3"), "num_hidden_layers": 4, "layer_types": kinds}))
    said = list[str]()
    assert read_config(path, {"num_hidden_layers": 2}, said.append).layer_types == kinds[:2]
    assert said == ["model: layer_types of config.json is cut from 4 layers to 2"]
    with raises_about("model.config.num_hidden_layers", 6) as caught:
        read_config(path, {"num_hidden_layers": 6})
    assert "give model.config.layer_types too, with 6 entries" in str(caught.value)
    for count, own in ((1, kinds[1:2]), (6, [*kinds, *kinds[:2]])):
        assert read_config(path, {"num_hidden_layers": count, "layer_types": own}).layer_types == own


def test_numbers_that_json_does_not_have_are_read_and_written_as_transformers_does(tmp_path):
    from transformers import AutoConfig

    wanted = AutoConfig.for_model(**{**keys_of("nemotron_h"), "time_step_limit": [0.5, float("inf")]})
    wanted.save_pretrained(tmp_path)
    model = build(path=str(tmp_path))
    assert list(model.config.time_step_limit) == [0.5, float("inf")]
    (tmp_path / "config.json").write_text(model.export_files()["config.json"])
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()
    assert list(AutoConfig.from_pretrained(tmp_path).time_step_limit) == [0.5, float("inf")]


def test_keys_of_a_folder_can_be_replaced(tmp_path):
    path = folder(tmp_path, json.dumps(keys_of("llama")))
    assert len(build(path=path, config={"num_hidden_layers": 3}).model.layers) == 3
    assert len(build(path=path).model.layers) == 2


def test_what_is_random_in_training_is_left_out():
    model = build(config=keys_of("gpt2"))
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
    model = build(config={**keys_of("mixtral"), "router_jitter_noise": 0.1})
    assert {m.jitter_noise for m in model.modules() if hasattr(m, "jitter_noise")} == {0.0}
    assert model.kept["router_jitter_noise"] == 0.1  # in the exported config.json


@pytest.mark.parametrize("size", [1e-6, 0.1])
def test_noise_that_no_key_switches_off_is_refused(size, monkeypatch):
    """A key of another name, say: noise on what experts get, drawn without a seed."""
    monkeypatch.setattr("plait_transformers.called.RANDOM", re.compile("drop"))
    monkeypatch.setattr(proof, "_facts", proof._facts.__wrapped__)  # without what other tests have found
    with pytest.raises(PlaitError, match="cannot train mixtral: its logits in training differ"):
        build(config={**keys_of("mixtral"), "router_jitter_noise": size})


def test_a_block_that_is_rarely_left_out_is_seen(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward = LlamaDecoderLayer.forward

    def sometimes(self, hidden_states, *args, **kwargs):
        left_out = self.training and torch.rand(()) < rate
        return hidden_states if left_out else forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", sometimes)
    monkeypatch.setattr(proof, "_facts", proof._facts.__wrapped__)  # without what other tests have found
    rate = 0.0
    assert build(config=keys_of("llama")).spec()  # what is drawn changes nothing
    rate = 0.1
    with pytest.raises(PlaitError, match="differ from those in evaluation"):
        build(config=keys_of("llama")).spec()


def test_sequences_are_not_divided_beside_a_recurrence():
    keys = json.dumps(keys_of("olmo_hybrid")).replace('"', "")
    run = ["model=transformers", f"+model.config={keys}", "strategy=[context_parallel,fsdp2]", "data.tokenizer=bytes"]
    with raises_about("strategy", "context_parallel") as caught:
        check(compose([*run, "train.seq_len=32", "model.config.vocab_size=272"]), 2)
    assert "'model.layers.*.linear_attn' of the model mixes the tokens of a whole row" in str(caught.value)


def test_rows_are_whole_where_blocks_name_no_summand():
    """BLOOM's parts add to the stream inside, so a rank of sequence parallelism would see its share of a row there."""
    keys = json.dumps(keys_of("bloom")).replace('"', "")
    run = ["model=transformers", f"+model.config={keys}", "strategy=[tensor_parallel]", "data.tokenizer=bytes"]
    run += ["train.seq_len=32", "model.config.vocab_size=272"]
    with raises_about("strategy.tensor_parallel.sequence_parallel", True, (False,)):
        check(compose(run), 2)
    check(compose([*run, "strategy.tensor_parallel.sequence_parallel=false"]), 2)


@pytest.mark.parametrize("kind", ["roformer", "llama4_text"])
def test_what_a_family_makes_of_a_part_of_a_row_is_refused(kind):
    """Its positions, or its masks. Called so, as a rank of sequence parallelism is, torch fails, or masks are wrong."""
    model = build(config=keys_of(kind))
    model.whole_rows[0].tokens = 6
    with pytest.raises(PlaitError, match=r"makes masks or positions of the 3 tokens of a rank's part .* a row has 6"):
        model.whole_rows[0](torch.zeros(1, 3, 32))
    assert not build(config=keys_of("llama")).whole_rows


def test_a_user_is_told_what_a_family_s_own_attention_costs():
    assert build(config=keys_of("llama")).said == []
    (line,) = build(config=keys_of("bloom")).said
    assert line.startswith("model: bloom computes attention by itself")
    assert line.endswith("data.attention=document is refused: packed documents would see each other")


def test_weights_without_a_tokenizer(tmp_path):
    """Trained weights must not see the ids of bytes because nobody named a tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps({**keys_of("llama"), "vocab_size": 300}))
    run = ["model=transformers", f"model.path={tmp_path}", "train.seq_len=16"]
    assert check(compose(run), 1).source.encoder.size == 257  # sizes alone
    (tmp_path / "model.safetensors").touch()
    with raises_about("data.tokenizer", str(tmp_path), "a folder with tokenizer.json"):
        check(compose(run), 1)
    assert check(compose([*run, "data.tokenizer=bytes"]), 1).source.encoder.size == 257
