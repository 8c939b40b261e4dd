"""The models agree with Hugging Face's `transformers`: models of random weights there, converted here and back."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from plait.checkpoint.init_from import read_weights
from plait.compose.build import build_model
from plait.parallel.initialize import initialise, materialise
from plait.parallel.state import tied_names
from plait_models.convert import convert, from_hf, to_hf

CLOSE = 1e-5  # of logits in float32, whose standard deviation is about 1
LENGTHS = [5, 1, 10, 24]  # of packed documents

SIZES = {"dim": 32, "n_layers": 3, "n_heads": 4, "vocab_size": 64, "max_seq_len": 64}
GROUPED = {**SIZES, "n_kv_heads": 2, "rope_theta": 100.0}
LLAMA = {"_target_": "plait_models.llama3.Llama3", **GROUPED, "ffn_dim": 48}
QWEN = {"_target_": "plait_models.qwen3.Qwen3", **GROUPED, "head_dim": 16, "ffn_dim": 48, "rope_theta": 1000.0}
QWEN_MOE = {**QWEN, "ffn_dim": 24, "n_experts": 8, "top_k": 3}
DEEPSEEK = {
    "_target_": "plait_models.deepseek_v3.DeepSeekV3", **SIZES, "n_dense_layers": 1, "q_lora_rank": 12,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 6, "ffn_dim": 48,
    "expert_ffn_dim": 16, "n_experts": 8, "n_shared_experts": 2, "top_k": 3, "n_groups": 4, "top_groups": 2,
    "route_scale": 2.5,
}  # fmt: skip
V2 = {**DEEPSEEK, "score": "softmax", "norm_weights": False, "bias_update": 0.0, "group_top": 1, "q_lora_rank": None}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 16}
YARN = {"factor": 4.0, "original_max_seq_len": 16, "beta_fast": 4.0}

LLAMA_THERE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "max_position_embeddings": 64, "intermediate_size": 48, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}  # fmt: skip
QWEN_THERE = {**LLAMA_THERE, "head_dim": 16, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}  # fmt: skip
MOE_THERE = {**QWEN_THERE, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3,
    "norm_topk_prob": True}  # fmt: skip
DEEPSEEK_THERE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 64, "max_position_embeddings": 64, "intermediate_size": 48, "moe_intermediate_size": 16,
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 6,
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}  # fmt: skip
V3_THERE = {**DEEPSEEK_THERE, "num_mtp_layers": 0, "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip
V2_THERE = {**DEEPSEEK_THERE, "q_lora_rank": None, "topk_method": "group_limited_greedy",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip


def rope(there, kind, **more):
    theta = there["rope_parameters"]["rope_theta"]
    more = {"factor": 4.0, "original_max_position_embeddings": 16, **more}
    return {**there, "rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


CASES = {  # name -> (options here, configuration class there, its options)
    "llama3": (LLAMA, "Llama", LLAMA_THERE),
    "llama3 tied": ({**LLAMA, "tie_embeddings": True}, "Llama", {**LLAMA_THERE, "tie_word_embeddings": True}),
    "llama3 scaled": (
        {**LLAMA, "rope_scaling": SCALING},
        "Llama",
        rope(LLAMA_THERE, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "qwen3": (QWEN, "Qwen3", QWEN_THERE),
    "qwen3 tied": ({**QWEN, "tie_embeddings": True}, "Qwen3", {**QWEN_THERE, "tie_word_embeddings": True}),
    "qwen3 yarn": ({**QWEN, "rope_scaling": YARN}, "Qwen3", rope(QWEN_THERE, "yarn", beta_fast=4.0)),
    "qwen3 sharper": (
        {**QWEN, "rope_scaling": {**YARN, "mscale": 2.0}},
        "Qwen3",
        rope(QWEN_THERE, "yarn", beta_fast=4.0, attention_factor=1.2772588722239782),
    ),
    "qwen3 moe": (QWEN_MOE, "Qwen3Moe", MOE_THERE),
    "qwen3 moe as they come": (
        {**QWEN_MOE, "norm_weights": False},
        "Qwen3Moe",
        {**MOE_THERE, "norm_topk_prob": False},
    ),
    "deepseek v3": (DEEPSEEK, "DeepseekV3", V3_THERE),
    "deepseek v3 one group": (
        {**DEEPSEEK, "n_groups": 1, "top_groups": 1, "norm_weights": False},
        "DeepseekV3",
        {**V3_THERE, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "deepseek v3 yarn": (
        {**DEEPSEEK, "rope_scaling": YARN},
        "DeepseekV3",
        rope(V3_THERE, "yarn", beta_fast=4.0, mscale=1.0, mscale_all_dim=1.0),
    ),
    "deepseek v3 sharper": (
        {**DEEPSEEK, "rope_scaling": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}},
        "DeepseekV3",
        rope(V3_THERE, "yarn", beta_fast=4.0, mscale=2.0, mscale_all_dim=0.5),
    ),
    "deepseek v2": (V2, "DeepseekV2", V2_THERE),
    "deepseek v2 greedy, yarn": (
        {**V2, "n_groups": 1, "top_groups": 1, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
        "DeepseekV2",
        rope({**V2_THERE, "topk_method": "greedy", "n_group": 1, "topk_group": 1}, "yarn", beta_fast=4.0,
             mscale=0.707, mscale_all_dim=0.707),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    return transformers


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture
def theirs(case, transformers):
    """A model there, no number of it as it would be by default."""
    _, name, options = case
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options, initializer_range=0.15)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "norm" in key:
                tensor.add_(torch.randn(tensor.shape) * 0.2)
            elif "e_score_correction_bias" in key:
                tensor.add_(torch.randn(tensor.shape) * 0.1)
    return model


def tokens():
    return torch.randint(64, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))


def positions():
    return torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)


def apart(model):
    """Logits of the documents one by one."""
    return torch.cat([model(part).logits for part in tokens().split(LENGTHS, dim=1)], dim=1)


def built(options):
    model, spec = build_model(options)
    materialise(model, "cpu")
    initialise(model, spec, seed=0)
    return model.eval()


def loaded(options, folder):
    model = built(options)
    ties = tied_names(model)
    read_weights(folder, {fqn: t for fqn, t in model.state_dict().items() if fqn not in ties}, ties)
    return model


@torch.no_grad()
def test_theirs_here(case, theirs, tmp_path):
    options = case[0]
    theirs.save_pretrained(tmp_path / "there")
    convert(build_model(options)[0], tmp_path / "there", tmp_path / "here", "plait")
    ours = loaded(options, tmp_path / "here")
    want = theirs(tokens()).logits
    assert 0.3 < want.std() < 3
    torch.testing.assert_close(ours(tokens()), want, rtol=0, atol=CLOSE)
    torch.testing.assert_close(ours(tokens(), positions()), apart(theirs), rtol=0, atol=CLOSE)


@torch.no_grad()
def test_ours_there(case, transformers, tmp_path):
    options, name, _ = case
    ours = built(options)
    with_state(ours, tmp_path / "here")
    convert(build_model(options)[0], tmp_path / "here", tmp_path / "there", "hf", max_shard_bytes=30_000)
    assert len(list((tmp_path / "there").glob("*.safetensors"))) > 1
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "there", output_loading_info=True)
    assert type(theirs).__name__ == f"{name}ForCausalLM"
    assert not any(info.values())
    torch.testing.assert_close(theirs(tokens()).logits, ours(tokens()), rtol=0, atol=CLOSE)
    torch.testing.assert_close(apart(theirs), ours(tokens(), positions()), rtol=0, atol=CLOSE)


def with_state(model, folder):
    """Weights as they would be after training, in a file."""
    from safetensors.torch import save_file

    ties = tied_names(model)
    state = {fqn: tensor for fqn, tensor in model.state_dict().items() if fqn not in ties}
    for fqn, tensor in state.items():
        if tensor.is_floating_point() and (tensor.dim() > 1 or "norm" in fqn):
            tensor.copy_(torch.randn(tensor.shape) * 0.15 + (tensor.dim() == 1))
    folder.mkdir()
    save_file(state, folder / "model.safetensors")


def test_weights_are_bitwise_after_the_round_trip(case, theirs, tmp_path):
    options = case[0]
    model = build_model(options)[0]
    theirs.save_pretrained(tmp_path / "1", max_shard_size="40KB")
    convert(model, tmp_path / "1", tmp_path / "2", "plait")
    convert(model, tmp_path / "2", tmp_path / "3", "hf", max_shard_bytes=30_000)
    convert(model, tmp_path / "3", tmp_path / "4", "plait", max_shard_bytes=30_000)
    before, after = whole(tmp_path / "1"), whole(tmp_path / "3")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    before, after = whole(tmp_path / "2"), whole(tmp_path / "4")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_same_in_memory(case, theirs, tmp_path):
    model = built(case[0])
    theirs.save_pretrained(tmp_path)
    there = whole(tmp_path)
    model.load_state_dict(from_hf(model, there), strict=False)
    torch.testing.assert_close(model(tokens()), theirs(tokens()).logits, rtol=0, atol=CLOSE)
    back = to_hf(model)
    assert back.keys() == there.keys()
    assert all(torch.equal(back[name], there[name]) for name in there)


def whole(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama3 scaled", "qwen3 yarn", "deepseek v3 yarn", "deepseek v2 greedy, yarn"])
def test_without_the_scaling_they_would_differ(name, transformers, tmp_path):
    options, kind, there = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**there, initializer_range=0.15)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path)
    plain = built({**options, "rope_scaling": None})
    plain.load_state_dict(from_hf(plain, whole(tmp_path)), strict=False)
    assert (plain(tokens()) - theirs(tokens()).logits).abs().max() > 1e-2


def test_config_says_what_transformers_says(case, transformers, tmp_path):
    """Every key that their configuration class has is written, with the value that it has there."""
    options, name, there = case
    model = built(options)
    with_state(model, tmp_path / "here")
    convert(model, tmp_path / "here", tmp_path / "there", "hf")
    read = transformers.AutoConfig.from_pretrained(tmp_path / "there").to_dict()
    want = getattr(transformers, f"{name}Config")(**there).to_dict()
    same = {key for key in want if key in there and key != "rope_parameters"} - {"intermediate_size", "head_dim"}
    assert {key: read[key] for key in same} == {key: want[key] for key in same}
    assert read["dtype"] == "float32"
    assert json.loads((tmp_path / "there" / "config.json").read_text())["architectures"] == [f"{name}ForCausalLM"]
