"""Each function that stands on a private name of torch does what it says with the torch that is installed."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from plait.host import simulated
from plait.system.torch_internals import dtensors
from plait_plan import torch_internals


def test_operators_and_nodes_are_seen():
    seen = []

    class Watch(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((torch_internals.schema(func).name, torch_internals.node_number()))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Watch():
        first = torch_internals.next_node()
        (x * 3).sum().backward()
    assert [name for name, number in seen if number is None][:2] == ["aten::mul", "aten::sum"]
    assert ("aten::mul", first) in seen  # backward of the first node
    assert torch_internals.node_number() is None


def test_fake_tensors_refuse_their_values():
    with torch_internals.FakeTensorMode() as mode:
        x = torch.ones(2)
        assert isinstance(x, torch_internals.FakeTensor)
        assert mode.fake_tensor_converter is not None
        for error, ask in (
            (torch_internals.DataDependentOutputException, lambda: x.sum().item()),
            (torch_internals.DynamicOutputShapeException, lambda: x.nonzero()),
        ):
            try:
                ask()
            except error:
                continue
            raise AssertionError(error)
    assert issubclass(torch_internals.UnsupportedOperatorException, RuntimeError)
    assert torch_internals.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    assert torch_internals.tree_map_only(int, str, [1, 2.0]) == ["1", 2.0]
    assert torch_internals.is_traceable_wrapper_subclass_type(DTensor)


def test_fake_tensors_are_made_as_torch_makes_them():
    with torch_internals.FakeTensorMode() as mode:
        make, device = torch_internals.FakeTensors(mode), torch.device("cpu")
        plain = torch.empty_strided((2, 3), (1, 2), device="meta", dtype=torch.bfloat16)
        made = [make.of(plain, device), make.of(plain, device), torch_internals.FakeTensor(mode, plain, device)]
    assert vars(made[0]) == vars(made[1]) == vars(made[2])
    assert vars(made[0]) is not vars(made[1])
    assert len({(type(m), m.shape, m.stride(), m.dtype, m.device, m.requires_grad) for m in made}) == 1
    assert len({torch_internals.storage_key(m.untyped_storage()) for m in made}) == 1
    assert torch_internals.dispatch_keys(made[1]) == torch_internals.dispatch_keys(made[2])


def test_storages_are_told_apart():
    one, other = torch.ones(2), torch.ones(2)
    assert torch_internals.storage_key(one[:1].untyped_storage()) == torch_internals.storage_key(one.untyped_storage())
    assert torch_internals.storage_key(one.untyped_storage()) != torch_internals.storage_key(other.untyped_storage())


def test_a_stage_gives_its_input_a_gradient_before_its_weights():
    part, stream = nn.Linear(2, 2, bias=False), torch.ones(1, 2, requires_grad=True)
    gradient, left = torch_internals.gradient_of_input(part(stream), [torch.ones(1, 2)], stream, part.parameters())
    assert torch.equal(gradient, part.weight.sum(0, keepdim=True))
    assert part.weight.grad is None
    torch_internals.gradients_of_weights(part.parameters(), left)
    assert torch.equal(part.weight.grad, torch.ones(2, 2))


def test_a_dtensor_shows_its_part_and_a_group_its_ranks():
    with simulated(4, rank=1):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        tensor = distribute_tensor(torch.arange(4.0), mesh["b"], [Shard(0)], src_data_rank=None)
        assert torch_internals.local_part(tensor).tolist() == [2, 3]
        assert torch_internals.ranks_of(mesh["a"].get_group().group_name) == (1, 3)
    assert torch_internals.local_part(plain := torch.ones(2)) is plain


def test_plans_of_dtensors_are_forgotten_and_their_questions_seen(monkeypatch):
    asked = []
    with simulated(2):
        mesh = init_device_mesh("cpu", (2,))
        for owner, name in torch_internals.shape_learners():
            plain = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *args, plain=plain: asked.append(args[1:]) or plain(*args))
        for _ in range(2):
            asked.clear()
            dtensors.forget_plans()
            DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False) + 1
            assert asked  # what is not forgotten is not asked again
        asked.clear()
        DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False) + 1
        assert not asked
