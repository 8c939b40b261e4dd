"""What shipped models have of their own, beside what test_conformance.py asks of all."""

import pickle
from typing import Any

import pytest
import torch

from plait.host import check, compose
from plait.parallel.initialize import initialise, materialise
from plait_testing.models import llama3, moe, qk_norm

MAKE: dict[str, Any] = {
    "llama3": llama3,
    "qwen3": qk_norm,
    "qwen3 experts": lambda **more: qk_norm(**{"n_experts": 8, "top_k": 2, **more}),
    "deepseek": moe,
}


@pytest.mark.parametrize("name", MAKE)
def test_equal_models_have_equal_specs_that_pickle(name):
    with torch.device("meta"):
        model, same, other = MAKE[name](), MAKE[name](), MAKE[name](n_layers=4)
    assert model.spec() == same.spec() == pickle.loads(pickle.dumps(model.spec()))
    assert model.spec() != other.spec()
    assert pickle.loads(pickle.dumps(model)).state_dict().keys() == model.state_dict().keys()


def test_only_a_mixture_has_routers():
    assert qk_norm().spec().routers == ()
    mixed = MAKE["qwen3 experts"]()
    assert list(mixed.spec().routers_of(mixed)) == [f"layers.{i}.feed_forward.router" for i in range(2)]


def test_depth_scales_what_joins_the_stream():
    with torch.device("meta"):
        spec = llama3(n_layers=3).spec()
    wide: Any = spec.init_of("layers.0.attention.wq.weight")
    narrow: Any = spec.init_of("layers.2.attention.wo.weight")
    assert narrow == spec.init_of("layers.1.feed_forward.w2.weight")
    assert narrow.std == pytest.approx(wide.std / 6**0.5)  # 3 blocks of 2 summands


def test_experts_are_filled_by_the_scheme():
    with torch.device("meta"):
        model = moe(dim=64, n_heads=8, expert_ffn_dim=64, ffn_dim=96)
    materialise(model, "cpu")
    initialise(model, model.spec(), seed=0)
    onto = 0.02 / (2 * 3) ** 0.5
    for name, std in {
        "layers.1.feed_forward.experts.w1": 0.02,
        "layers.1.feed_forward.experts.w2": onto,
        "layers.1.feed_forward.shared.w2.weight": onto,
        "layers.0.feed_forward.w2.weight": onto,
        "layers.2.attention.wo.weight": onto,
        "layers.2.attention.wkv_b.weight": 0.02,
        "layers.2.feed_forward.router.weight": 0.02,
        "tok_embeddings.weight": 1.0,
    }.items():
        assert model.get_parameter(name).std().item() == pytest.approx(std, rel=0.1), name
    assert not any(b.any() for b in model.buffers())


def test_the_debug_models_cost_about_the_same():
    from plugins.models.tests.test_conformance import CONF, built

    mine, theirs = (built(CONF / f"{name}_debug.yaml").spec().flops(256) for name in ("deepseek_v3", "llama3"))
    assert 0.8 < mine / theirs < 1.25


def test_a_run_keeps_the_versions_of_the_packages_of_its_model_and_data():
    assert {"plait-models", "plait-data"} <= {*check(compose([]), 1).distributions}
