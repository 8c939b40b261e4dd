"""Families under strategies, against one process: gradients in float64."""

import functools

import families
import pytest
from grid import BOUND, UNDER

from plait import PlaitError

QUICK = ("qwen2", "gemma2")  # grouped heads and biases; windows, caps and packed documents
EXACT = (
    *("llama", "qwen3", "mistral", "gemma", "gemma3_text", "olmo", "olmo2", "phi3", "gpt2", "gpt_neox", "stablelm"),
    *("starcoder2", "granite", "cohere", "glm", "smollm3", "phi", "olmo3", "cohere2", "glm4", "helium", "ernie4_5"),
    *(
        "exaone4",
        "arcee",
        "seed_oss",
        "mixtral",
        "qwen3_moe",
        "bitnet",
        "deepseek_v3",
        "gpt_oss",
        "granitemoe",
        "olmoe",
    ),
    *("qwen2_moe", "diffllama", "lfm2", "vaultgemma", "gpt_bigcode", "modernbert-decoder"),
    *("persimmon", "nemotron", "nanochat", "ministral", "ministral3", "hunyuan_v1_dense", "cwm", "internlm3", "jais2"),
    *("hyperclovax", "iquestcoder", "granite_swa", "flint", "laguna", "mellum", "solar_open", "glm4_moe", "hy_v3"),
    *("ernie4_5_moe", "granitemoeshared", "hunyuan_v1_moe", "aria_text", "exaone_moe", "cohere2_moe", "kolibri1"),
    *("minimax_m2", "flex_olmo", "mimo_v2_flash", "afmoe", "granitemoe_swa", "beam", "gpt-sw3"),
)
FOLDS = {"gpt2", "gpt-sw3"}  # tokens into the batch


def on_rank(kind, strategies, documents=False, chunks=1):
    try:
        return families.result(kind, strategies, documents, chunks)
    except PlaitError as error:
        return str(error)


def lies(kind, strategies):
    """FQN -> (the share that a rank stores, the parts of which it has a share each)."""
    (model,) = families.OfFamily(kind=kind).apply(strategies).parts
    parts = lambda p: max(getattr(placement, "split_factor", 1) for placement in p.placements)  # noqa: E731
    return {fqn: (p.to_local().numel() / p.numel(), parts(p)) for fqn, p in model.named_parameters()}


def check(pool, kind, strategy, documents=False):
    run = functools.partial(pool.run, on_rank, kind)
    kept = pool.kept.setdefault("families", {})
    if (kind, documents) not in kept:
        kept[kind, documents] = run({}, documents, world=1)[0]
    answers = run(UNDER[strategy], documents, world=2)
    if strategy == "tensor_parallel" and kind in FOLDS:
        assert all("folds tokens into the batch" in answer for answer in answers)
        return
    for answer in answers:
        error, name = families.apart(answer, kept[kind, documents])
        assert error < BOUND, (name, error)


@pytest.mark.parametrize("strategy", ["fsdp2", "tensor_parallel"])
@pytest.mark.parametrize("kind", QUICK)
def test_quick(kind, strategy, plait_ranks):
    check(plait_ranks, kind, strategy, documents=kind == "gemma2")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [name for name in UNDER if name != "expert_parallel"])
@pytest.mark.parametrize("kind", EXACT)
def test_gradients_equal_those_of_one_process(kind, strategy, plait_ranks):
    check(plait_ranks, kind, strategy)


MIXTURES = (
    *("qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe", "olmoe", "qwen2_moe", "laguna", "mellum", "solar_open"),
    *("glm4_moe", "hy_v3", "ernie4_5_moe", "granitemoeshared", "hunyuan_v1_moe", "aria_text", "exaone_moe", "afmoe"),
    *("cohere2_moe", "kolibri1", "minimax_m2", "flex_olmo", "mimo_v2_flash", "granitemoe_swa"),
)


@pytest.mark.parametrize("kind", ["mixtral", *(pytest.param(kind, marks=pytest.mark.slow) for kind in MIXTURES)])
def test_experts_are_divided(kind, plait_ranks):
    wanted = plait_ranks.run(on_rank, kind, {}, world=1)[0]
    for answer in plait_ranks.run(on_rank, kind, UNDER["expert_parallel"], world=2):
        error, name = families.apart(answer, wanted)
        assert error < BOUND, (name, error)
        assert [fqn for fqn, lies in answer.placements.items() if "over ep" in lies]


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("phi3", marks=pytest.mark.slow)])
def test_each_part_of_a_fused_matrix_is_divided(kind, plait_ranks):
    check(plait_ranks, kind, "tensor_parallel")
    placements = plait_ranks.run(lies, kind, UNDER["tensor_parallel"], world=2)[0]
    fused = {fqn: found for fqn, found in placements.items() if "gate_up_proj" in fqn}
    assert len(fused) == 2
    assert all(share == 0.5 and parts == 2 for share, parts in fused.values()), fused


@pytest.mark.slow
def test_experts_beside_tensor_ranks(plait_ranks):
    strategies = {"fsdp2": {}, "tensor_parallel": {"degree": 2}, "expert_parallel": {"degree": 2}}
    wanted = plait_ranks.run(on_rank, "mixtral", {}, world=1)[0]
    for answer in plait_ranks.run(on_rank, "mixtral", strategies, world=4):
        error, name = families.apart(answer, wanted)
        assert error < BOUND, (name, error)


MORE = {
    "fewer groups than ranks": ("qwen2", {"tensor_parallel": {"degree": 4}}, 1),
    "tp 2 x fsdp2 2": ("gemma3_text", {"tensor_parallel": {"degree": 2}, "fsdp2": {}}, 1),
    "cp 2 x fsdp2 2": ("llama", {"context_parallel": {"degree": 2}, "fsdp2": {}}, 1),
    "a ring with windows and caps": ("gemma2", {"context_parallel": {"degree": 2, "method": "ring"}, "fsdp2": {}}, 1),
    "keys gathered, windows and a scale": ("gemma3_text", {"context_parallel": {"degree": 2}, "fsdp2": {}}, 1),
    "the loss in chunks": ("llama", {"tensor_parallel": {"degree": 2}, "fsdp2": {}}, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_on_4_ranks(case, plait_ranks):
    kind, strategies, chunks = MORE[case]
    wanted = plait_ranks.run(on_rank, kind, {}, world=1)[0]
    for answer in plait_ranks.run(on_rank, kind, strategies, chunks=chunks, world=4):
        error, name = families.apart(answer, wanted)
        assert error < BOUND, (name, error)
