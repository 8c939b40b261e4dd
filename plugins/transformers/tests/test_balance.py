"""The balance loss of a family's mixtures: its gradients are those of transformers' own, in every layout."""

from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from families import OfFamily, built, keys_of

from plait import PlaitError
from plait.host import check, compose
from plait.testing import raises_about, train, worst_gradient
from plait_testing.pool import RankError
from plait_testing.widened import Widened
from plait_transformers.balance import Balanced
from plait_transformers.encoders import class_of

FACTOR = 0.5  # large, so that an error in it is one in every gradient
BOUND = 1e-10
UNDER: dict[str, dict[str, Any]] = {
    "ddp": {"ddp": {}},
    "fsdp2": {"fsdp2": {}},
    "simplefsdp": {"simplefsdp": {}},
    "tensor_parallel": {"tensor_parallel": {"degree": 2}},
    "whole rows": {"tensor_parallel": {"degree": 2, "sequence_parallel": False}},
    "expert_parallel": {"fsdp2": {}, "expert_parallel": {"degree": 2}},
    "context_parallel": {"fsdp2": {}, "context_parallel": {"degree": 2}},
    "both": {"fsdp2": {}, "tensor_parallel": {"degree": 2}},
}
MIXTURES = [
    *("dbrx", "deepseek_v4", "ernie4_5_moe", "flex_olmo", "gpt_oss", "granitemoe", "granitemoe_swa"),
    *("granitemoehybrid", "granitemoeshared", "jamba", "laguna", "mellum", "minimax", "minimax_m2"),
    *("minimax_m3_vl_text", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next"),
]
QUICK = {"mixtral"}
FFN = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}


def trained(kind: str, strategies: dict[str, Any], **options: Any) -> Any:
    """Called on every rank."""
    return train(OfFamily(kind=kind, balance_loss=FACTOR, steps=2, **options), strategies)


def of_transformers(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """(what one process trained, the gradients of its first step as transformers' own class has them)."""
    found = trained(kind, {})
    trial = OfFamily(kind=kind)
    config = built(kind).config
    own = class_of(config)._from_config(config, attn_implementation="eager", experts_implementation="eager").double()
    own.load_state_dict(found.initial, strict=False)  # which has no buffers
    tokens, labels = trial.batch(0)
    with Widened():
        result = own.train()(tokens, output_router_logits=True, use_cache=False)
        (F.cross_entropy(result.logits.flatten(0, 1), labels.flatten()) + FACTOR * result.aux_loss).backward()
    return found, {name: param.grad for name, param in own.named_parameters() if param.grad is not None}


def slow_but(names, quick):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


LAYOUTS = [
    pytest.param(kind, under, marks=[] if kind in QUICK and under != "both" else [pytest.mark.slow])
    for kind in ("mixtral", "gpt_oss", "qwen3_5_moe", "granitemoehybrid")
    for under in UNDER
    if under != "context_parallel" or kind in ("mixtral", "gpt_oss")  # the mixers of others need whole rows
]


@pytest.mark.parametrize("kind", slow_but(MIXTURES, QUICK))
def test_gradients_are_those_of_transformers(kind, plait_ranks):
    ((found, wanted),) = plait_ranks.run(of_transformers, kind, world=1)
    assert worst_gradient(found, attrs.evolve(found, gradients=wanted))[0] <= BOUND


@pytest.mark.parametrize(("kind", "under"), LAYOUTS)
def test_gradients_are_those_of_one_process(kind, under, plait_ranks):
    alone = plait_ranks.run(trained, kind, {}, world=1)[0]
    for found in plait_ranks.run(trained, kind, UNDER[under], world=4 if under == "both" else 2):
        assert worst_gradient(found, alone)[0] <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"remat": "full"}, {"documents": True}, {"chunks": 2}], ids=str)
def test_options_of_a_step_change_nothing(options, plait_ranks):
    alone = plait_ranks.run(trained, "mixtral", {}, world=1, **{n: v for n, v in options.items() if n == "documents"})[
        0
    ]
    for found in plait_ranks.run(trained, "mixtral", UNDER["fsdp2"], **options, world=2):
        assert worst_gradient(found, alone)[0] <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_block_reads_the_counts_after_forward(backend, plait_ranks):
    options = {"world": 2, "narrow": True}
    plain, found = (
        plait_ranks.run(trained, "mixtral", UNDER["fsdp2"], compile=which, **options)[0] for which in (None, backend)
    )
    assert worst_gradient(found, plain)[0] <= 1e-6  # this family casts to float32 by hand


def test_a_model_has_the_factor_that_transformers_trains_with():
    assert not any(isinstance(module, Balanced) for module in built("mixtral").modules())
    of_folder = built("mixtral", output_router_logits=True, router_aux_loss_coef=0.02)
    assert {m.balance_loss for m in of_folder.modules() if isinstance(m, Balanced)} == {0.02}
    assert "model: a loss balances the experts, with the factor 0.02" in of_folder.said
    assert not of_folder.why_no_documents
    of_part = built("dbrx", output_router_logits=True, ffn_config={**FFN, "moe_loss_weight": 5.0})
    assert {m.balance_loss for m in of_part.modules() if isinstance(m, Balanced)} == {5.0}
    assert not built("mixtral", 0.0, output_router_logits=True).spec().routers
    assert len(built("mixtral", 0.1).spec().routers) == 2


@pytest.mark.slow
def test_a_language_part_has_the_loss_of_the_whole():
    """Whose class of transformers returns none: set-up compares with its function."""
    assert len(built("qwen3_vl_moe", 0.1).spec().routers) == 2


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("llama", "transformers has no balance loss of experts for llama"),
        ("jetmoe", "the balance loss of jetmoe in transformers is of another form"),
    ],
)
def test_a_family_without_the_loss_is_refused(kind, why):
    with pytest.raises(PlaitError, match=why):
        built(kind, balance_loss=0.1)


@pytest.mark.parametrize("value", [-1, True, "much", float("nan")])
def test_a_factor_is_a_number_of_at_least_0(value):
    with raises_about("model.balance_loss"):
        built("mixtral", balance_loss=value)


def test_a_second_forward_in_a_step_is_refused(plait_ranks):
    with pytest.raises(RankError, match=r"over the whole batch.*this is the second forward of the step"):
        plait_ranks.run(trained, "mixtral", {"fsdp2": {}}, world=2, micro=2)


def asked(*overrides: str) -> Any:
    keys = ",".join(f"{key}: {value}" for key, value in {**keys_of("mixtral"), "vocab_size": 512}.items())
    of_model = ["model=transformers", f"model.config={{{keys}}}", "model.balance_loss=0.1"]
    return check(compose([*of_model, "train.seq_len=32", "data=stdlib", *overrides]), 2)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (
            ["strategy=[fsdp2]", "train.local_batch_size=2", "train.global_batch_size=8"],
            r"train.global_batch_size=8 is computed in 2 parts.*set train.global_batch_size=4, or "
            r"train.local_batch_size=4, or model.balance_loss=0",
        ),
        (["strategy=[pipeline]"], "over the whole batch.*but pipeline divides the layers"),
    ],
)
def test_what_divides_the_batch_is_refused_before_ranks_start(overrides, why):
    asked("strategy=[fsdp2]")
    with pytest.raises(PlaitError, match=why):
        asked(*overrides)
