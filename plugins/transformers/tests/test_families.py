"""Families under strategies, against one process: gradients in float64. The README's table says how each ends."""

import functools

import families
import pytest
from grid import BOUND, PAGE, UNDER, of_any, outcomes, read

from plait import PlaitError

ROWS = read(PAGE)[0] if PAGE.exists() else {}  # nothing beside an installed package
QUICK = ("qwen2", "gemma2")  # grouped heads and biases; windows, caps and packed documents


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


def check(pool, kind, strategies, world, documents=False, chunks=1):
    """The answers of the ranks, whose gradients are those of one process."""
    run = functools.partial(pool.run, on_rank, kind)
    kept = pool.kept.setdefault("families", {})
    if (kind, documents) not in kept:
        kept[kind, documents] = run({}, documents, world=1)[0]
    answers = run(strategies, documents, chunks, world=world)
    for answer in answers:
        error, name = families.apart(answer, kept[kind, documents])
        assert error < BOUND, (name, error)
    return answers


@pytest.mark.parametrize("strategy", ["fsdp2", "tensor_parallel"])
@pytest.mark.parametrize("kind", QUICK)
def test_quick(kind, strategy, plait_ranks):
    check(plait_ranks, kind, UNDER[strategy], 2, documents=kind == "gemma2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROWS)
def test_a_family_ends_as_the_table_says(kind, plait_ranks):
    """Exact, with these parts divided, or refused with the sentence of the page. Each family by itself:
    `pytest "test_families.py::test_a_family_ends_as_the_table_says[llama]"`."""
    found = outcomes(plait_ranks, kind)
    ends = {name: (one.said, of_any(one.note, kind)) for name, one in found.items()}
    assert ends == {name: (one.said, one.note) for name, one in ROWS[kind].items()}


def test_experts_are_divided(plait_ranks):
    for answer in check(plait_ranks, "mixtral", UNDER["expert_parallel"], 2):
        assert any("over ep" in lies for lies in answer.placements.values())


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("phi3", marks=pytest.mark.slow)])
def test_each_part_of_a_fused_matrix_is_divided(kind, plait_ranks):
    check(plait_ranks, kind, UNDER["tensor_parallel"], 2)
    placements = plait_ranks.run(lies, kind, UNDER["tensor_parallel"], world=2)[0]
    fused = {fqn: found for fqn, found in placements.items() if "gate_up_proj" in fqn}
    assert len(fused) == 2
    assert all(share == 0.5 and parts == 2 for share, parts in fused.values()), fused


EXPERTS_AND_TENSORS = {"fsdp2": {}, "tensor_parallel": {"degree": 2}, "expert_parallel": {"degree": 2}}


BESIDE = {"tensor ranks": EXPERTS_AND_TENSORS} | {
    name: {name: {}, "expert_parallel": {"degree": 2}} for name in ("simplefsdp", "ddp")
}


@pytest.mark.slow
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_beside(kind, beside, plait_ranks):
    check(plait_ranks, kind, BESIDE[beside], 4)


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
    check(plait_ranks, kind, strategies, 4, chunks=chunks)
