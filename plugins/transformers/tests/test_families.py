"""Families under strategies, against one process: gradients in float64."""

import functools

import families
import pytest

from plait import PlaitError

QUICK = ("qwen2", "gemma2")
EXACT = (
    *("llama", "qwen3", "mistral", "gemma", "gemma3_text", "olmo", "olmo2", "phi3", "gpt2", "gpt_neox", "stablelm"),
    *("starcoder2", "granite", "cohere", "glm", "smollm3", "phi", "olmo3", "cohere2", "glm4", "helium", "ernie4_5"),
    *("exaone4", "arcee", "seed_oss", "mixtral", "qwen3_moe"),
)
UNDER = {
    "ddp": {"ddp": {}},
    "fsdp2": {"fsdp2": {}},
    "simplefsdp": {"simplefsdp": {}},
    "tensor_parallel": {"tensor_parallel": {"degree": 2}},
}
FOLDS = {"gpt2"}  # tokens into the batch
BOUND = 1e-10


def on_rank(kind, strategies, documents):
    try:
        return families.result(kind, strategies, documents)
    except PlaitError as error:
        return str(error)


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
@pytest.mark.parametrize("strategy", UNDER)
@pytest.mark.parametrize("kind", EXACT)
def test_gradients_equal_those_of_one_process(kind, strategy, plait_ranks):
    check(plait_ranks, kind, strategy)
