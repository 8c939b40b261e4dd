"""Copies of the state in main memory: taken once, used again, never while they are being written."""

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.checkpoint.load import load
from plait.checkpoint.save import Saver
from plait.checkpoint.staging import Staging
from plait.checkpoint.store import Store
from plait.parallel.state import canonical_state
from plait_testing.pool import Pool


class Allocated(TorchDispatchMode):
    """bytes: of tensors that operations made in memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        given = {memory(t).data_ptr() for t in args if isinstance(t, Tensor)}
        if isinstance(answer, Tensor) and memory(answer).data_ptr() not in given:
            self.bytes += memory(answer).nbytes()
        return answer


def memory(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def state_of(*shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {f"model.{i}": torch.randn(shape) for i, shape in enumerate(shapes)} | {
        "optimizer.0.step": torch.tensor(3.0)
    }


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def test_the_second_copy_takes_no_memory() -> None:
    state, staging, counts = state_of((100, 30), (7,), (0, 3)), Staging(), []
    state["model.t"] = torch.randn(20, 10).t()
    for _ in range(3):
        with Allocated() as allocated:
            staged = staging.copy(state)
        assert equal(staged, state)
        counts.append(allocated.bytes)
        for tensor in state.values():
            tensor.add_(1)
        assert not equal(staged, state)
    total = sum(tensor.nbytes for tensor in state.values())
    assert counts == [total, 0, 0]


def test_what_has_another_form_gets_other_memory() -> None:
    state, staging = state_of((8, 3), (5,)), Staging()
    first = staging.copy(state)
    changes: list[dict[str, Tensor]] = [
        {"model.0": torch.randn(3, 8)},
        {"model.0": torch.randn(8, 3).double()},
        {"model.0": torch.randn(8, 3), "model.2": torch.randn(4)},
    ]
    for change in changes:
        assert equal(staging.copy(state | change), state | change)
    kept = weakref.ref(staging.copy(state)["model.0"])
    del state["model.0"]
    assert equal(staging.copy(state), state)
    gc.collect()
    assert kept() is None
    assert staging.copy(state)["model.1"] is first["model.1"]


def test_a_save_waits_until_the_copy_of_the_last_one_is_written(tmp_path: Path) -> None:
    state, saver, go = state_of((1000,)), Saver(Store(tmp_path), "async"), threading.Event()
    before = state["model.0"].clone()
    saver._thread.submit(go.wait)  # nothing is written before the second save has begun
    saver.save(state, 1)
    state["model.0"].add_(1)
    second = threading.Thread(target=saver.save, args=(state, 2))
    second.start()
    time.sleep(0.2)
    go.set()
    second.join()
    saver.wait()
    for step, expected in ((1, before), (2, before + 1)):
        found = torch.zeros(1000)
        load(tmp_path / f"step-{step}", {"model.0": found})
        assert torch.equal(found, expected)


def saves_of_shards(folder: str) -> tuple[list[int], list[bool], list[str]]:
    """Bytes that three asynchronous saves allocate; whether what each holds is right; what the copies are."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 31), nn.Linear(31, 3))
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters())
    mesh = init_device_mesh("cpu", (2,))
    extra = distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)])
    saver, counts, right = Saver(Store(folder), "async", keep=9), [], []
    for step in (1, 2, 3):
        net(torch.ones(2, 30)).sum().backward()
        optimizer.step()
        state = canonical_state(net, optimizer)[0] | {"model.extra": extra}
        expected = {key: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for key, t in state.items()}
        saver.wait()
        with Allocated() as allocated:
            staged = saver._staging.copy(state)
        counts.append(allocated.bytes)
        saver.save(state, step)
        for tensor in state.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)
        saver.wait()
        found = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
        load(Path(folder, f"step-{step}"), found)
        right.append(equal(found, expected))
    again: Any = staged["model.extra"]
    whole = distribute_tensor(torch.randn(5, 4), mesh, [Replicate()])
    copy: Any = saver._staging.copy({"model.extra": whole})["model.extra"]
    assert torch.equal(copy.to_local(), whole.to_local())
    return counts, right, [type(again).__name__, str(again.placements)]


def test_shards_are_copied_into_the_same_memory(plait_ranks: Pool, tmp_path: Path) -> None:
    for counts, right, form in plait_ranks.run(saves_of_shards, str(tmp_path), world=2):
        assert counts[0] > 30 * 31 * 4  # weights and two moments, halved
        assert counts[1:] == [0, 0]
        assert right == [True] * 3
        assert form == ["DTensor", "(Shard(dim=0),)"]


def test_what_is_asked_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one: the calls, in order. The first copy locks its memory first; each waits once for all tensors."""
    calls, runtime, stream = [], mock.Mock(), mock.MagicMock()
    runtime.cudaHostRegister.side_effect = lambda *args: calls.append("lock") or 0
    runtime.cudaHostUnregister.side_effect = lambda *args: calls.append("unlock")
    stream.wait_stream.side_effect = lambda other: calls.append("wait for training")
    stream.synchronize.side_effect = lambda: calls.append("wait")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    monkeypatch.setattr("plait.checkpoint.staging._on_gpu", lambda tensor: tensor.dim() > 0)
    state, staging = state_of((300, 40), (7,), (0,)), Staging()
    assert equal(staging.copy(state), state)
    assert calls == ["lock", "lock", "wait for training", "wait"]  # no lock for what is empty
    for _ in range(2):
        calls.clear()
        for tensor in state.values():
            tensor.add_(1)
        assert equal(staging.copy(state), state)
        assert calls == ["wait for training", "wait"]
    calls.clear()
    del state["optimizer.0.step"], state["model.1"]
    state["model.0"] = state["model.0"][:100]
    assert equal(staging.copy(state), state)
    gc.collect()
    assert calls == ["unlock", "lock", "wait for training", "wait", "unlock"]
