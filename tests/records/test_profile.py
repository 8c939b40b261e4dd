"""Traces of steps: written where asked, with names for blocks and collectives, and gone without a trace afterwards."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from plait.contract.axes import MeshAxis, join_axes
from plait.contract.config import Profile
from plait.records.profiler import Profiler, axis_of, name_all


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + torch.relu(self.up(x))
        torch.ones(1).add_(1)  # without a gradient, after the last operation with one
        return y


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Block(), Block())


def parts(net: nn.Sequential) -> dict[str, nn.Module]:
    return {"blocks.1": net[1], "blocks.2": net[2]}


def train(net: nn.Module, profiler: Profiler, steps: range) -> None:
    with profiler:
        for n in steps:
            net(torch.randn(4, 8)).sum().backward()
            profiler.end(n)


def trace(folder: Path, name: str) -> list[dict[str, Any]]:
    return [e for e in json.loads((folder / "profile" / name).read_text())["traceEvents"] if e.get("ph") == "X"]


def traced(folder: Path, net: nn.Sequential, run: range, name: str, done: int = 0, **conf: int) -> list[Any]:
    """The events of the only trace of a run of these steps, which has this name."""
    before = hooks(net)
    train(net, Profiler(Profile(enabled=True, **conf), folder, 0, parts(net), "cpu", done=done), run)
    assert [file.name for file in (folder / "profile").iterdir()] == [f"{name}-rank0.json"]
    assert hooks(net) == before
    return trace(folder, f"{name}-rank0.json")


def hooks(net: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())


def contains(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1


def test_blocks_have_their_names_forward_and_backward(tmp_path: Path) -> None:
    net = model()
    events = traced(tmp_path / "runs" / "a", net, range(1, 7), "step-3-4", start=3, steps=2)  # it makes the folders
    names = [e["name"] for e in events]
    assert [names.count(f"step {n}") for n in (2, 3, 4, 5)] == [0, 1, 1, 0]
    for fqn in parts(net):
        assert names.count(fqn) == 2
        assert names.count(f"{fqn} backward") == 2
        for forward in (e for e in events if e["name"] == fqn):
            assert sum(e["name"] == "aten::addmm" and contains(forward, e) for e in events) == 1
        for backward in (e for e in events if e["name"] == f"{fqn} backward"):
            inside = [e["name"] for e in events if contains(backward, e)]
            assert inside.count("AddmmBackward0") == 1
            assert inside.count("TBackward0") == inside.count("ReluBackward0") == 1


def test_what_a_strategy_does_around_a_block_counts_as_the_block_s(tmp_path: Path) -> None:
    net = model()

    def gather(*_: Any) -> None:
        with record_function("gather"):
            torch.ones(1)

    net[1].register_forward_pre_hook(gather)
    net[1].register_forward_hook(gather)
    events = traced(tmp_path, net, range(1, 2), "step-1-1", start=1, steps=1)
    block = next(e for e in events if e["name"] == "blocks.1")
    assert [contains(block, e) for e in events if e["name"] == "gather"] == [True, True]


def test_hooks_are_there_only_while_steps_are_traced(tmp_path: Path) -> None:
    net = model()
    seen = []
    with Profiler(Profile(enabled=True, start=2, steps=1), tmp_path, 0, parts(net), "cpu") as profiler:
        for n in range(1, 5):
            seen.append(hooks(net))
            profiler.end(n)
    assert seen == [0, 4, 0, 0]


@pytest.mark.parametrize(
    ("conf", "rank", "done"),
    [(Profile(), 0, 0), (Profile(enabled=True, ranks=[1]), 0, 0), (Profile(enabled=True, start=2, steps=2), 0, 3)],
    ids=["disabled", "another rank", "resumed past it"],
)
def test_nothing_is_installed_where_nothing_is_asked(conf: Profile, rank: int, done: int, tmp_path: Path) -> None:
    net = model()
    with Profiler(conf, tmp_path, rank, parts(net), "cpu", done=done) as profiler:
        assert profiler._profile is None
        for n in range(done + 1, done + 4):
            assert hooks(net) == 0
            profiler.end(n)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_traces_what_is_left(tmp_path: Path) -> None:
    names = [e["name"] for e in traced(tmp_path, model(), range(3, 6), "step-3-4", done=2, start=2, steps=3)]
    assert [names.count(f"step {n}") for n in (2, 3, 4, 5)] == [0, 1, 1, 0]


def test_a_run_that_ends_early_keeps_what_was_traced(tmp_path: Path) -> None:
    names = [e["name"] for e in traced(tmp_path, model(), range(1, 3), "step-1-2", start=1, steps=9)]
    assert names.count("blocks.1") == 2


def test_it_says_which_steps_it_traced(tmp_path: Path) -> None:
    said: list[str] = []
    conf = Profile(enabled=True, start=1, steps=2)
    train(model(), Profiler(conf, tmp_path, 0, {}, "cpu", say=said.append), range(1, 4))
    assert "steps 1 to 2" in said[0]


def test_a_block_that_is_compiled_while_it_is_traced(tmp_path: Path) -> None:
    net = model()
    net[1].compile(backend="aot_eager", fullgraph=True)  # the hooks are inside this graph
    net[2].forward = torch.compile(net[2].forward, backend="aot_eager", fullgraph=True)
    names = [e["name"] for e in traced(tmp_path, net, range(1, 4), "step-1-2", start=1, steps=2)]
    assert names.count("blocks.2") == 2
    assert names.count("blocks.2 backward") == 2


def on_a_rank(folder: Path) -> list[list[str]]:
    """Both axes of a 2 x 2 mesh at work, and the group of all, inside blocks and outside."""
    from plait.parallel.mesh import Mesh

    axes = [MeshAxis("outer", 2, splits="batch"), MeshAxis("inner", 2)]
    mesh = Mesh(join_axes([("test", axes)], 4), "cpu")

    class Talk(nn.Module):
        def __init__(self, axis: str) -> None:
            super().__init__()
            self.group = mesh[axis].get_group()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x, group=self.group)
            return x

    blocks = {"layers.0": Talk("outer"), "layers.1": Talk("inner")}
    conf = Profile(enabled=True, start=2, steps=2, ranks=[0, 3])
    with Profiler(conf, folder, dist.get_rank(), blocks, "cpu", mesh.axes_by_group()) as profiler:
        for n in range(1, 5):
            for block in blocks.values():
                block(torch.ones(16))
            dist.all_reduce(torch.ones(4))
            profiler.end(n)
    whole = Mesh(join_axes([("test", [MeshAxis("all", 4)])], 4), "cpu")
    return [list(m.axes_by_group().values()) for m in (mesh, whole)]


def test_collectives_have_their_axis_and_their_block(plait_ranks: Any, tmp_path: Path) -> None:
    assert plait_ranks.run(on_a_rank, tmp_path, world=4) == [[["inner", "outer"], ["all"]]] * 4
    written = sorted(os.listdir(tmp_path / "profile"))
    assert written == ["step-2-3-rank0.json", "step-2-3-rank3.json"]
    for name in written:
        events = trace(tmp_path, name)
        started = [e for e in events if e["name"].startswith("c10d::allreduce_")]
        assert [e["args"]["axis"] for e in sorted(started, key=lambda e: e["ts"])] == ["outer", "inner", "world"] * 2
        assert {(e["args"]["axis"], e["args"]["within"][:8]) for e in started} == {
            ("outer", "layers.0"), ("inner", "layers.1"), ("world", "step 2"), ("world", "step 3"),
        }  # fmt: skip
        assert {e["name"] for e in started} == {f"c10d::allreduce_ [{axis}]" for axis in ("outer", "inner", "world")}
        carried = [e["name"] for e in events if e["name"].startswith("gloo:all_reduce")]
        assert sorted(carried) == [
            f"gloo:all_reduce [{axis}]" for axis in ("inner", "outer", "world") for _ in range(2)
        ]


def test_an_axis_that_spans_the_world_gives_its_name_to_the_group_of_all() -> None:
    assert axis_of("0", "default_pg", {"0": "dp_shard"}) == "dp_shard"


def test_what_was_begun_before_the_trace_is_not_taken_for_what_follows() -> None:
    def event(name: str, ts: float, thread: int) -> dict[str, Any]:
        category = "cpu_op" if name.startswith("c10d") else "user_annotation"
        return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": 4.0, "pid": 1, "tid": thread, "args": {}}

    events = [event("gloo:all_reduce", 5.0, 2), event("c10d::allreduce_", 10.0, 1), event("gloo:all_reduce", 12.0, 3)]
    noted = {"time_created_ns": 11_000, "process_group": ["7", "mesh_tp"], "profiling_name": "gloo:all_reduce"}
    name_all({"traceEvents": events}, [], {}, [noted])
    assert [e["name"] for e in events] == ["gloo:all_reduce", "c10d::allreduce_ [tp]", "gloo:all_reduce [tp]"]


def test_collectives_of_nccl_say_their_group_themselves() -> None:
    event = {
        "ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather", "ts": 1.0, "dur": 2.0, "pid": 0, "tid": 7,
        "args": {"Process Group Name": "5", "Process Group Description": "mesh_dp_shard"},
    }  # fmt: skip
    name_all({"traceEvents": [event]}, [], {"5": "dp_shard"})
    assert event["name"] == "ncclDevKernel_AllGather [dp_shard]"


@pytest.mark.parametrize(
    ("group", "description", "axis"),
    [("3", "mesh_tp", "tp"), ("4", "mesh_data", "data"), ("0", "default_pg", "world"), ("9", "undefined", "group 9")],
)
def test_axis_of_a_group(group: str, description: str, axis: str) -> None:
    assert axis_of(group, description, {"3": "tp"}) == axis
