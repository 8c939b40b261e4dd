"""Only what is finite becomes a checkpoint, and a run that is no longer finite says where to go on."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from plait.checkpoint.finite import Extremes, where_to_go_on
from plait.checkpoint.save import Saver
from plait.checkpoint.store import Manifest, Store
from plait.contract.errors import PlaitError
from plait.parallel.state import canonical_state
from plait_testing.pool import Pool


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("value", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "inf")])
def test_the_first_bad_tensor_is_named(dtype: torch.dtype, value: float, word: str) -> None:
    state = {
        "largest": torch.full((3, 3), torch.finfo(dtype).max, dtype=dtype),
        "empty": torch.empty(0, dtype=dtype),
        "count": torch.tensor(3),
        "bytes": torch.ones(3).to(torch.float8_e4m3fn),
        "model.a": torch.ones(40, 50, dtype=dtype).t(),
        "model.b": torch.tensor(value, dtype=dtype),
    }
    assert Extremes(state).first_bad() == f"'model.b' holds {word}"
    state["model.a"][7, 31] = -math.inf
    assert Extremes(state).first_bad() == "'model.a' holds inf"
    del state["model.a"], state["model.b"]
    assert Extremes(state).first_bad() is None


def test_infinity_in_a_mask_or_in_a_plain_number_is_no_error() -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("mask", torch.full((2, 2), -math.inf))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net.weight] = {"best": math.inf}
    state = canonical_state(net, optimizer)[0]
    assert {"model.mask", "optimizer.weight.best"} < set(state)
    assert Extremes(state).first_bad() is None
    optimizer.state[net.weight]["mean"] = torch.tensor([1, math.nan])
    assert Extremes(canonical_state(net, optimizer)[0]).first_bad() == "'optimizer.weight.mean' holds nan"


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        made = [t for t in (answer if isinstance(answer, tuple) else (answer,)) if isinstance(t, torch.Tensor)]
        self.calls.append((func.name().split("::")[1], sum(t.numel() for t in made)))
        return answer


def test_the_check_reads_each_tensor_once_and_copies_none() -> None:
    state = {f"model.{i}": torch.ones(100, 100) for i in range(20)}
    with Counted() as counted:
        Extremes(state).first_bad()
    on_tensors = [name for name, _ in counted.calls if name == "aminmax"]
    assert len(on_tensors) == len(state)
    assert max(made for _, made in counted.calls) == 2 * len(state)  # values, not elements
    assert len(counted.calls) <= 3 * len(state) + 10


def store(folder: Path, *steps: int) -> Store:
    found = Store(folder)
    for step in steps:
        found.temporary(step).mkdir(parents=True)
        found.commit(found.temporary(step), Manifest(step))
    return found


def test_where_to_go_on(tmp_path: Path) -> None:
    assert where_to_go_on(store(tmp_path / "none")) == "no checkpoint was saved yet"
    two, one = store(tmp_path / "two", 40, 80), store(tmp_path / "one", 40)
    assert where_to_go_on(two) == "the last good checkpoint is kept: step-80"
    assert where_to_go_on(two, two.path_of(40), 80) == "the last good checkpoint is kept: step-80"
    again = "saved nothing since, so it would end here again: "
    assert where_to_go_on(two, two.path_of(80)) == (
        f"it resumed from step-80 and {again}remove {two.path_of(80)} to continue from step-40, or lower optimizer.lr"
    )
    assert where_to_go_on(one, one.path_of(40)) == (
        f"it resumed from step-40 and {again}no earlier one is left, so lower optimizer.lr, or start again with "
        "another run.name"
    )
    assert where_to_go_on(one, two.path_of(80)) == (
        f"it resumed from step-80 and {again}let checkpoint.load name an earlier one than {two.path_of(80)}, or lower "
        "optimizer.lr"
    )


def save_what_one_rank_broke(folder: str, mode: str, what: str, value: float, resumed: bool) -> tuple[str, list[str]]:
    """Step 1 is good, at step 2 rank 1 holds `value` in a parameter or a moment, at step 3 all is well again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    saver = Saver(Store(folder), mode)
    state, _ = canonical_state(model, optimizer)
    saver.save(state, 1)
    saver.wait()
    if resumed:
        saver = Saver(Store(folder), mode)
        saver.resumed = Path(folder, "step-1")
    stored: Any = state[what]
    own = stored.to_local()
    kept = own.clone()
    if dist.get_rank() == 1:
        own[-1] = value
    message = ""
    try:
        saver.save(canonical_state(model, optimizer)[0], 2)
        own.copy_(kept)  # what was staged counts, not what is there when it is written
        saver.wait()
    except PlaitError as error:
        message = str(error)
    dist.barrier()
    left = sorted(p.name for p in Path(folder).iterdir())
    own.copy_(kept)
    saver.save(canonical_state(model, optimizer)[0], 3)
    saver.wait()
    assert saver.saved == 3
    dist.barrier()
    return message, left + sorted(p.name for p in Path(folder).iterdir())


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("what", "value", "word"), [("model.0.weight", math.nan, "nan"), ("optimizer.0.bias.exp_avg_sq", math.inf, "inf")]
)
def test_what_one_rank_broke_is_told_on_all_and_leaves_nothing(
    plait_ranks: Pool, tmp_path: Path, mode: str, what: str, value: float, word: str
) -> None:
    expected = (
        f"the checkpoint of step 2 could not be saved: {what!r} holds {word} (rank 1); "
        "the last good checkpoint is kept: step-1"
    )
    for message, found in plait_ranks.run(save_what_one_rank_broke, str(tmp_path), mode, what, value, False, world=2):
        assert message == expected
        assert found == ["step-1", "step-1", "step-3"]


def test_a_resumed_run_that_breaks_before_it_saves_is_told_to_go_back(plait_ranks: Pool, tmp_path: Path) -> None:
    arguments = (str(tmp_path), "async", "model.0.bias", -math.inf, True)
    for message, _ in plait_ranks.run(save_what_one_rank_broke, *arguments, world=2):
        assert message.startswith(
            "the checkpoint of step 2 could not be saved: 'model.0.bias' holds inf (rank 1); it resumed from step-1 "
            "and saved nothing since, so it would end here again: no earlier one is left, "
        )
