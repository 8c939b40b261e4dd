"""Every shipped model, and those that strategies are tested with, keep what a model owes to strategies."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import plait_models
from plait.compose.build import build_model
from plait.testing import ModelSuite
from plait_testing.models import MODELS

CONF = Path(plait_models.__file__).parent / "conf" / "model"
LLAMA = {"dim": 32, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 48, "vocab_size": 64, "max_seq_len": 16}
QWEN = {**LLAMA, "head_dim": 8, "ffn_dim": 64}
DEEPSEEK = {
    "dim": 32, "n_layers": 3, "n_dense_layers": 1, "n_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "ffn_dim": 48, "expert_ffn_dim": 16, "n_experts": 8,
    "n_shared_experts": 1, "top_k": 2, "n_groups": 4, "top_groups": 2, "route_scale": 2.0, "bias_update": 0.05,
    "balance_loss": 0.01, "max_seq_len": 16, "vocab_size": 64,
}  # fmt: skip
SCALING = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8}
TIED = (("output.weight", "tok_embeddings.weight"),)


class Variant(ModelSuite):
    """Differs from another one of this file by an option: what takes longest is left to `make test-all`."""

    @pytest.mark.slow
    def test_gradients_equal_finite_differences(self):
        super().test_gradients_equal_finite_differences()

    @pytest.mark.slow
    def test_blocks_are_captured_whole(self):
        super().test_blocks_are_captured_whole()


class TestLlama3(ModelSuite):
    model = "llama3_debug"
    options = LLAMA
    counts = {
        "llama3_debug": 2_894_080,
        "llama3_1b": 1_235_814_400,
        "llama3_3b": 3_212_749_824,
        "llama3_8b": 8_030_261_248,
        "llama3_70b": 70_553_706_496,
        "llama3_405b": 405_853_388_800,
    }


class TestLlama3Tied(Variant):
    model, options, ties = "llama3_debug", {**LLAMA, "tie_embeddings": True}, TIED


class TestLlama3Scaled(Variant):
    model, options = "llama3_debug", {**LLAMA, "rope_scaling": SCALING}


class TestQwen3(ModelSuite):
    model = "qwen3_debug"
    options = QWEN
    counts = {
        "qwen3_debug": 2_894_464,
        "qwen3_moe_debug": 7_621_248,
        "qwen3_0.6b": 596_049_920,
        "qwen3_8b": 8_190_735_360,
        "qwen3_30b_a3b": 30_532_122_624,
    }


class TestQwen3Tied(Variant):
    model, options, ties = "qwen3_debug", {**QWEN, "tie_embeddings": True}, TIED


class TestQwen3Experts(ModelSuite):
    model, options = "qwen3_moe_debug", {**QWEN, "ffn_dim": 16, "n_experts": 8, "top_k": 2}


class TestDeepSeekV3(ModelSuite):
    model = "deepseek_v3_debug"
    options = DEEPSEEK
    counts = {
        "deepseek_v3_debug": 5_673_856,
        "deepseek_v3_16b": 15_706_484_224,
        "deepseek_v3_671b": 671_026_404_352,  # and 14,848 biases of routers, which are buffers
    }


class TestDeepSeekV2(Variant):
    model = "deepseek_v3_debug"
    options = {**DEEPSEEK, "n_dense_layers": 0, "score": "softmax", "group_top": 1, "norm_weights": False}


class TestDeepSeekAlone(Variant):
    model = "deepseek_v3_debug"
    options = {**DEEPSEEK, "n_dense_layers": 0, "n_shared_experts": 0, "n_groups": 1, "q_lora_rank": None}


class TestDeepSeekDense(Variant):
    model, options = "deepseek_v3_debug", {**DEEPSEEK, "n_dense_layers": 3}


class TestOdd(ModelSuite):
    ties = (("readout.weight", "words.weight"),)
    constant = ("trunk.units.*.att.key.bias",)  # softmax does not feel it

    def build(self):
        with torch.device("meta"):
            return MODELS["odd"]()


def built(path):
    return build_model(OmegaConf.to_container(OmegaConf.load(path)))[0]


def test_every_shipped_config_is_counted():
    counted = [size for suite in (TestLlama3, TestQwen3, TestDeepSeekV3) for size in suite.counts]
    assert sorted(counted) == sorted(path.stem for path in CONF.glob("*.yaml"))


@pytest.mark.parametrize("path", [*CONF.glob("*.yaml")], ids=lambda path: path.stem)
def test_sizes_divide_by_four(path):
    node = OmegaConf.load(path)
    keys = ("vocab_size", "n_heads", "n_kv_heads", "ffn_dim", "expert_ffn_dim", "n_experts")
    assert not any(node.get(key, 0) % 4 for key in keys)


@pytest.mark.parametrize("path", [*CONF.glob("*_debug.yaml")], ids=lambda path: path.stem)
def test_debug_models_are_explained_and_divide_by_four(path):
    keys = [line for line in path.read_text().splitlines() if not line.startswith(("#", "_target_"))]
    assert keys
    assert all("#" in line for line in keys)
    assert not [n for p in built(path).parameters() for n in p.shape if n % 4]
