"""What a step really costs a rank: the trainer itself on ranks that talk over gloo, watched by torch's own tools."""

import bisect
import contextlib
import json
import math
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from plait.contract.config import Config
from plait.records.run_folder import RunFolder
from plait.train.trainer import Trainer
from plait_models.moe import Router
from plait_testing.count import Counting

STEP = "the second step"


@attrs.frozen
class Measured:
    """Of a rank's second step. collectives: (kind, axis, bytes) in order. Sizes are bytes.

    peak: the most that the allocator had given out. with_gloo: the same with gloo's own copies of what it moves, which
    live as long as its threads need: it differs from run to run.
    """

    collectives: list[tuple[str, str, int]]
    parameters: int
    gradients: int
    optimizer: int
    peak: int
    with_gloo: int


class InOrder(Counting):
    """Every collective by itself."""

    def __init__(self, mesh: Any) -> None:
        super().__init__(mesh)
        self.each: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {key: len(seen) for key, seen in self._seen.items()}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for key, seen in self._seen.items():
            if len(seen) > before.get(key, 0):
                size = next(t.element_size() for t in torch.utils._pytree.tree_leaves(args) if hasattr(t, "numel"))
                self.each.append((*key, seen[-1] * size))
        return result


def measure(config: Config, collectives: bool, worst: bool = False) -> Measured:
    """On each rank of a pool: two steps of the run of the checked `config`.

    collectives: they are counted, which the allocator notices, so its peak is told only without. worst: routers
    send all tokens to the first experts; otherwise as many to each.
    """
    held: list[int] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(Router, "_choose", _to_the_first if worst else _evenly),
    ):
        (Path(folder) / "versions.json").write_text("{}")
        watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False)
        with contextlib.nullcontext() if collectives else watched as profiler:
            trainer = Trainer(config, RunFolder(Path(folder)), lambda text: None)
            trainer.restore()
            pending, _ = trainer.train_step()
            pending.row()
            trainer.optimizer.register_step_pre_hook(lambda *_: held.append(_bytes(_grads(trainer))))
            counting = InOrder(trainer.mesh)
            if collectives:
                with counting:
                    pending, _ = trainer.train_step()
            else:
                with record_function(STEP):
                    pending, _ = trainer.train_step()
            pending.row()
            stored = [*trainer.applied.parameters(), *(b for part in trainer.parts for b in part.buffers())]
            state = [v for s in trainer.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
            sizes = _bytes(stored), held[-1], _bytes(state)
        peaks = (0, 0) if collectives else _peak(profiler, Path(folder) / "trace.json")
    return Measured(counting.each, *sizes, *peaks)


def _evenly(router: Any, biased_NX: torch.Tensor) -> torch.Tensor:
    rows, experts = biased_NX.shape
    return (torch.arange(rows * router.top_k) % experts).view(rows, router.top_k)


def _to_the_first(router: Any, biased_NX: torch.Tensor) -> torch.Tensor:
    return torch.arange(router.top_k).expand(biased_NX.shape[0], -1).contiguous()


def _grads(trainer: Trainer) -> list[Any]:
    return [p.grad for p in trainer.applied.parameters() if p.grad is not None]


def _bytes(tensors: Any) -> int:
    """Of the storages, each once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def _peak(profiler: Any, file: Path) -> tuple[int, int]:
    """(the most that the step holds at once, the same with what gloo takes for copies of its own)."""
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    (step,) = (e for e in events if e.get("name") == STEP and e.get("ph") == "X" and e.get("cat") == "user_annotation")
    start, end = step["ts"], step["ts"] + step["dur"]
    backend = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "cpu_op" and e["name"].startswith("c10d::") and e["tid"] == step["tid"]
    )
    # The profiler's own total has what an earlier session in this process has left.
    held: dict[str, tuple[int, bool]] = {}
    now, most = [0, 0], [0, 0]
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        address, size, when = event["args"]["Addr"], event["args"]["Bytes"], event["ts"]
        if size > 0:
            lost, counted = held.pop(address, (0, False))  # freed by a thread of gloo, which the profiler does not see
            now = [now[0] - lost * counted, now[1] - lost]
            at = bisect.bisect_right(backend, (when, math.inf)) - 1
            ours = event["tid"] == step["tid"] and not (at >= 0 and when <= backend[at][1])
            held[address] = (size, ours)
        else:
            size, ours = held.pop(address, (0, False))
            size = -size
        now = [now[0] + size * ours, now[1] + size]
        if start <= when <= end:
            most = [max(m, n) for m, n in zip(most, now, strict=True)]
    return most[0], most[1]
