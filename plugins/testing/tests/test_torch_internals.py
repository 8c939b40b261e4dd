"""What the suites see of torch's private tables and caches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from plait.host import forget_plans, simulated
from plait_testing import torch_internals as internals


def test_hooks_are_counted():
    module = nn.Linear(2, 2)
    module.register_forward_hook(print)
    module.register_forward_pre_hook(print)
    module.register_full_backward_hook(print)
    module.register_full_backward_pre_hook(print)
    assert internals.hooks_of(module) == (1, 1, 1, 1)
    module.weight.register_hook(print)
    module.weight.register_post_accumulate_grad_hook(print)
    assert internals.hooks_of_tensor(module.weight) == 2
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.register_step_pre_hook(print)
    optimizer.register_step_post_hook(print)
    assert internals.hooks_of_optimizer(optimizer) == 2
    before = internals.global_hooks()
    handle = nn.modules.module.register_module_forward_hook(print)
    after = internals.global_hooks()
    handle.remove()
    assert sum(after.values()) == sum(before.values()) + 1


def test_modes_operators_and_storages_are_told_apart():
    class Watch(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((internals.schema(func).name, internals.modes()["dispatch"]))
            return func(*args, **(kwargs or {}))

    seen = []
    one, other = torch.ones(2), torch.ones(2)
    with Watch():
        assert internals.modes() == {"function": 0, "dispatch": 1}
        one * other
    assert seen == [("aten::mul", 0)]  # a mode is off inside of itself
    keys = [internals.storage_key(each.untyped_storage()) for each in (one, one[:1], other)]
    assert keys[0] == keys[1] != keys[2]
    assert internals.tree_leaves({"a": [1, (2,)]}) == [1, 2]


def test_groups_are_listed_and_plans_forgotten(monkeypatch):
    asked = []
    for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
        if plain := getattr(ShardingPropagator, name, None):
            monkeypatch.setattr(ShardingPropagator, name, lambda *args, plain=plain: asked.append(args) or plain(*args))
    with simulated(2):
        half = dist.new_group([0])
        assert internals.all_groups() == [dist.group.WORLD, half]
        mesh = init_device_mesh("cpu", (2,))
        for forget in (True, True, False):
            if forget:
                forget_plans()
            asked.clear()
            DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False) + 1
            assert bool(asked) == forget  # what is not forgotten is not asked again


def test_compiled_code_is_forgotten():
    graphs = []
    compiled = torch.compile(lambda x: x * 2, backend=lambda graph, _: graphs.append(graph) or graph)
    for _ in range(2):
        compiled(torch.ones(2))
        compiled(torch.ones(2))
        internals.forget_compiled()
    assert len(graphs) == 2
    assert internals.functional_collectives().__name__ == "torch.distributed._functional_collectives"
