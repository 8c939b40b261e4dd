"""What is remembered of operators, and steps of optimizers on shards alone, change nothing in a trace."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plait.host import check, compose, simulated
from plait_plan.engine import plannable
from plait_plan.torch_internals import FakeTensorMode, storage_key
from plait_plan.tracing import fake, recorder, remembered
from plait_plan.tracing.shards import parts_alone
from plait_plan.tracing.trace import StepTrace, trace

SMALL = ["train.seq_len=32", "train.local_batch_size=1", "validation.interval=0", "precision.param=bfloat16"]
RUNS = {
    "tensors": ["strategy=[tensor_parallel,fsdp2]", "remat.mode=selective", "model.n_layers=2"],
    "experts": ["strategy=[expert_parallel,fsdp2]", "model=deepseek_v3_debug", "model.n_layers=2", "cluster=h100"],
    "plain": ["strategy=[ddp]", "model.n_layers=1", "precision.param=float32"],
}


def step(given: list[str]) -> StepTrace:
    found = check(plannable(compose([*SMALL, *given]), []), 4)
    return trace(found.config, 4, 0, 512, first=True)


@pytest.mark.parametrize(
    "case", [pytest.param("tensors", marks=pytest.mark.slow), pytest.param("experts", marks=pytest.mark.slow), "plain"]
)
def test_a_trace_is_the_same_as_without_what_shortens_it(case: str, monkeypatch: Any) -> None:
    remembered.KNOWN.clear()
    first, again = step(RUNS[case]), step(RUNS[case])
    assert len(remembered.KNOWN) > 100
    monkeypatch.setattr(fake, "RememberingMode", FakeTensorMode)
    monkeypatch.setattr(recorder, "parts_alone", lambda func, args: None)
    plain = step(RUNS[case])
    for short in (first, again):
        assert short.operators == plain.operators
        assert short.levels == plain.levels
        assert (short.pools.levels, short.pools.gaps) == (plain.pools.levels, plain.pools.gaps)


def test_what_is_made_again_shares_what_it_shared() -> None:
    def shared() -> list[Any]:
        with remembered.RememberingMode():
            x = torch.empty(4, 6)
            row, added = x[1:, ::2], x.add_(1)
            parts, (most, places) = x.split(2, dim=1), x.max(dim=0)
            made = [row, added, *parts, most, places, torch.empty(0), x.detach(), row.contiguous()]
            first = [storage_key(one.untyped_storage()) for one in made]
            own = storage_key(x.untyped_storage())
            return [
                (one is x, key == own, first.index(key), one.shape, one.stride(), one.storage_offset(), one.dtype)
                for one, key in zip(made, first, strict=True)
            ]

    remembered.KNOWN.clear()
    fresh, count = shared(), len(remembered.KNOWN)
    assert shared() == fresh  # now remembered
    assert len(remembered.KNOWN) == count
    assert [(same, view) for same, view, *_ in fresh[:5]] == [(False, True), (True, True), *[(False, True)] * 3]


def test_numbers_of_other_types_and_values_are_other_calls() -> None:
    with remembered.RememberingMode():
        x = torch.empty(3, dtype=torch.int64)
        assert [(x + more).dtype for more in (1, True, 1.0, 1)] == [*[torch.int64] * 2, torch.float32, torch.int64]
        assert [torch.full((2,), value).dtype for value in (1, 1.0, True)] == [torch.int64, torch.float32, torch.bool]
        assert x.sum(dtype=torch.float64).dtype == torch.float64
        assert torch.empty(3, requires_grad=True).mul(2).requires_grad
        assert torch.tensor(7).item() == torch.tensor(7).item() == 7  # of known value


def test_a_result_in_memory_that_torch_would_not_give_it_is_left_to_torch() -> None:
    with remembered.RememberingMode() as mode:
        x = torch.empty(8)
        assert mode._of(x, []) is not None
        assert mode._of(x[:4], []) is mode._of(x[4:], []) is None


def test_only_what_lies_alike_is_stepped_alone() -> None:
    adamw = torch.ops.aten._fused_adamw_.default
    with simulated(4):
        mesh = init_device_mesh("cpu", (4,))

        def laid(placement: Any) -> DTensor:
            return DTensor.from_local(torch.ones(2, 2), mesh, [placement], run_check=False)

        count = torch.ones(())
        lists = [[laid(Shard(0)), laid(Replicate())] for _ in range(4)]
        alone = parts_alone(adamw, (*lists, [], [count, count]))
        assert alone is not None
        assert [type(t) for given in alone for t in given] == [torch.Tensor] * 10
        other = [laid(Shard(1)), laid(Replicate())]
        summed = [[laid(Partial())] for _ in range(4)]
        plain = [torch.ones(2, 2), laid(Replicate())]
        assert parts_alone(adamw, (*lists[:3], other, [], [count, count])) is None
        assert parts_alone(adamw, (*summed, [], [count])) is None
        assert parts_alone(adamw, (*lists[:3], plain, [], [count, count])) is None
        assert parts_alone(adamw, (*lists, [], [torch.ones(2), count])) is None
        assert parts_alone(torch.ops.aten._foreach_add_.List, (lists[0], lists[1])) is None
