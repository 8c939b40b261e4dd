"""The shipped configs: published sizes, exactly, and operations a token by hand."""

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

import plait

CONF = Path(plait.__file__).parent / "conf" / "model"
COUNTS = {
    "llama3_debug": 2_894_080,
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "deepseek_v3_debug": 5_673_856,
    "deepseek_v3_16b": 15_706_484_224,
    "deepseek_v3_671b": 671_026_404_352,  # and 14,848 biases of routers, which are buffers
    "qwen3_debug": 2_894_464,
    "qwen3_moe_debug": 7_621_248,
    "qwen3_0.6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "qwen3_30b_a3b": 30_532_122_624,
}


def load(name):
    return OmegaConf.load(CONF / f"{name}.yaml")


def build(name):
    with torch.device("meta"):
        return instantiate(load(name))


def test_every_shipped_config_is_counted():
    assert {path.stem for path in CONF.glob("*.yaml")} == set(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_parameters(name):
    assert sum(p.numel() for p in build(name).parameters()) == COUNTS[name]


def test_flops_of_8b_by_hand():
    block = 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    parameters = 32 * block + 4096 + 128256 * 4096  # the head counts, the input embedding does not
    attention = 32 * 32 * (128 + 128) * 8192
    assert build("llama3_8b").spec().flops(8192) == 6 * parameters + 6 * attention == 57_914_449_920


def test_flops_of_70b_by_hand():
    block = 8192 * 8192 + 2 * 8192 * 1024 + 8192 * 8192 + 3 * 8192 * 28672 + 2 * 8192
    parameters = 80 * block + 8192 + 128256 * 8192
    attention = 80 * 64 * (128 + 128) * 8192
    assert build("llama3_70b").spec().flops(8192) == 6 * parameters + 6 * attention == 481_442_709_504


def test_flops_of_a_tied_head_still_count():
    block = 2048 * 2048 + 2 * 2048 * 512 + 2048 * 2048 + 3 * 2048 * 8192 + 2 * 2048
    parameters = 16 * block + 2048 + 128256 * 2048
    attention = 16 * 32 * (64 + 64) * 4096
    assert build("llama3_1b").spec().flops(4096) == 6 * parameters + 6 * attention


@pytest.mark.parametrize("name", COUNTS)
def test_sizes_divide_by_four(name):
    node = load(name)
    keys = ("vocab_size", "n_heads", "n_kv_heads", "ffn_dim", "expert_ffn_dim", "n_experts")
    assert not any(node.get(key, 0) % 4 for key in keys)


def test_every_key_of_the_debug_model_is_explained():
    keys = [
        line for line in (CONF / "llama3_debug.yaml").read_text().splitlines() if not line.startswith(("#", "_target_"))
    ]
    assert keys
    assert all("#" in line for line in keys)
