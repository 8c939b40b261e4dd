"""Each function that stands on a private name of torch does what it says with the torch that is installed."""

import datetime
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from plait.parallel.simulated import simulated
from plait.system.torch_internals import (
    collectives,
    compiler,
    dtensors,
    groups,
    memory,
    meshes,
    modules,
)


def test_groups_are_listed_named_and_given_a_timeout():
    with simulated(4, rank=1):
        half = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=5))
        assert groups.all_groups() == [dist.group.WORLD, half]
        assert isinstance(groups.default_store(), dist.Store)


def _recorded() -> tuple[float, list]:
    group = dist.group.WORLD
    groups.set_timeout(group, 7)
    dist.all_reduce(torch.ones(3))
    dumped = [json.loads(dump() or b"{}") for dump in groups.flight_recorders().values()]
    options = group._get_backend(torch.device("cpu")).options
    return options._timeout.total_seconds(), [e["profiling_name"] for each in dumped for e in each.get("entries", [])]


def test_collectives_get_a_timeout_and_are_recorded(plait_ranks):
    for seconds, recorded in plait_ranks.run(_recorded, world=2):
        assert seconds == 7
        assert "gloo:all_reduce" in recorded


def _reduced() -> list[float]:
    mesh, x = init_device_mesh("cpu", (2,)), torch.tensor([float(dist.get_rank()), 2.0])
    return [*collectives.reduced(x, "sum", mesh).tolist(), *collectives.reduced(x, "max", mesh).tolist()]


def test_a_tensor_is_reduced_over_ranks(plait_ranks):
    assert plait_ranks.run(_reduced, world=2) == [[1, 4, 1, 2]] * 2


def test_meshes_are_joined_divided_and_renamed():
    with simulated(8):
        world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
        two = meshes.factored(world, (2, 4), ("a", "b"))
        assert two.mesh_dim_names == ("a", "b")
        assert two.shape == (2, 4)
        joint = meshes.joined_meshes([two["a"], two["b"]])
        assert joint.mesh.tolist() == two.mesh.tolist()
        assert meshes.flattened(two, "both").mesh_dim_names == ("both",)
        meshes.rename(joint, "c", "d")
        assert joint.mesh_dim_names == ("c", "d")


def test_a_placement_is_a_share_of_each_part():
    placed = dtensors.strided_shard(0, 2)
    assert isinstance(placed, Shard) or hasattr(placed, "split_factor")
    assert placed.split_factor == 2


def test_the_compiler_says_what_it_can_and_does():
    assert "inductor" in compiler.backends()
    assert compiler.is_imported()
    assert compiler.has_partitioner_option("activation_memory_budget")
    assert not compiler.has_partitioner_option("activation_memory_budgets")
    told = []
    begin, end = (lambda about, word=word: told.append(word) for word in ("begin", "end"))
    compiler.progress().register_start_callback(begin)
    compiler.progress().register_end_callback(end)
    try:
        compiled = torch.compile(double, backend="eager")
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    finally:
        compiler.progress().remove_start_callback(begin)
        compiler.progress().remove_end_callback(end)
    assert told == ["begin", "end"]
    assert compiler.original(compiled) is double
    assert compiler.original(double) is None
    torch.compiler.reset()


def double(x):
    return x * 2


def test_the_partitioner_takes_options_for_some_time():
    import torch._functorch.config as options

    before = options.activation_memory_budget
    with compiler.partitioner_options(activation_memory_budget=0.25):
        assert options.activation_memory_budget == 0.25
    assert options.activation_memory_budget == before


class Double(nn.Module):
    def forward(self, x):
        return double(x)


def test_a_module_can_be_kept_outside_of_a_graph():
    model = nn.Sequential(Double(), Double())
    model[1].register_forward_hook(lambda module, args, result: result)  # without any, torch calls only its forward
    assert not compiler.has_compiled_call(model[1])
    compiler.call_outside_of_graph(model[1], "it is a test")
    assert compiler.has_compiled_call(model[1])
    with pytest.raises(RuntimeError, match="it is a test"):
        torch.compile(model.forward, backend="eager", fullgraph=True)(torch.ones(1, 2))
    torch.compiler.reset()


def test_the_allocator_and_gpus_answer_without_a_gpu(monkeypatch, tmp_path):
    assert memory.gpu_lost_by_fork() is False
    taken = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", taken.append)
    memory.set_allocator("expandable_segments:False")
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: taken.append(how))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", taken.append)
    memory.record_history(entries=10)
    memory.write_history(tmp_path)
    assert taken == ["expandable_segments:False", {"max_entries": 10}, str(tmp_path), {"enabled": None}]


def test_hooks_are_counted():
    module = nn.Linear(2, 2)
    module.register_forward_hook(print)
    module.register_forward_pre_hook(print)
    module.register_full_backward_hook(print)
    module.register_full_backward_pre_hook(print)
    kinds = ("forward pre hooks", "forward hooks", "backward pre hooks", "backward hooks")
    assert {kind: len(hooks) for kind, hooks in modules.hooks_of(module).items()} == dict.fromkeys(kinds, 1)
    module.weight.register_hook(print)
    module.weight.register_post_accumulate_grad_hook(print)
    assert modules.hooks_of_tensor(module.weight) == 2
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.register_step_pre_hook(print)
    optimizer.register_step_post_hook(print)
    tables = [kind for kind in vars(optimizer) if kind.endswith("_hooks") and len(getattr(optimizer, kind))]
    assert len(tables) == 2
    modules.without_hooks(optimizer)
    assert not any(len(getattr(optimizer, kind)) for kind in tables)


def test_a_child_stands_under_each_of_its_names():
    module = nn.Module()
    module.a = module.b = nn.Linear(1, 1)
    module.register_module("c", None)
    assert modules.children_of(module) == {"a": module.a, "b": module.a, "c": None}
