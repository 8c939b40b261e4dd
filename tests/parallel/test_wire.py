"""A parameter travels in the form that a strategy gave it, and every layout computes with what the form makes of it."""

import functools

import attrs
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import plait
from plait import ModelSpec, Precision, hookimpl
from plait.parallel.simulated import simulated
from plait.testing import Trial, assert_same, train, worst_gradient
from plait_testing.models import llama3

pytestmark = pytest.mark.usefixtures("own_group")


@attrs.define
class Bytes:
    """The wire form of a matrix whose rows are rounded to 127 steps."""

    def to_wire(self, stored, dtype):
        scale = plait.whole_tensor(stored.abs().amax(1, keepdim=True)) / 127
        local = stored.to_local() if isinstance(stored, DTensor) else stored
        return (local / scale[plait.held_indices(stored, 0)]).round().to(torch.int8), scale

    def from_wire(self, gathered, scale, dtype):
        local = gathered.to_local() if isinstance(gathered, DTensor) else gathered
        return (local * scale[plait.held_indices(gathered, 0)]).to(dtype)


@attrs.define
class InBytes:
    """Sets that form."""

    name, phase = "in_bytes", "model"

    @hookimpl
    def parallelize(self, model, spec):
        for block in spec.blocks_of(model).values():
            for module in block.modules():
                if isinstance(module, nn.Linear):
                    plait.set_wire_form(module, "weight", Bytes())


UNEVEN = functools.partial(llama3, ffn_dim=50, n_heads=2, n_kv_heads=1, dim=40)  # of 50 rows 4 ranks have 13 or 11
LAYOUTS = {
    "of uneven shards": ({"fsdp2": {}}, {}),
    "of uneven shards, in the graph": ({"simplefsdp": {}}, {}),
    "on the CPU": ({"fsdp2": {"cpu_offload": True, "replicate": 2}}, {"micro": 2}),
    "compiled": ({"simplefsdp": {}}, {"compile": "aot_eager", "remat": "full"}),
    "compiled, divided twice": ({"simplefsdp": {}, "tensor_parallel": {}}, {"compile": "aot_eager"}),
    "gathered early, and kept": ({"fsdp2": {"prefetch": 1, "reshard_after_forward": "never"}}, {"remat": "full"}),
    "replicas of tensor ranks, compiled": ({"ddp": {}, "tensor_parallel": {}}, {"compile": "aot_eager"}),
}


@pytest.mark.parametrize(
    "layout", [n if n.startswith("of uneven shards") else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_a_layout_equals_one_process(plait_ranks, layout):
    strategies, changes = LAYOUTS[layout]
    plain = Trial(UNEVEN)
    one, exact = (plait_ranks.once(train, plain, {}, extra, world=1)[0] for extra in ([InBytes()], []))
    assert worst_gradient(one, exact)[0] > 1e-3
    assert_same(plait_ranks.run(train, attrs.evolve(plain, **changes), strategies, [InBytes()], world=4), one)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.inner.weight.data = torch.tensor([[1.27, 0.503], [0.0, 2.54]])

    def forward(self, x):
        return self.inner(x)


SPEC = ModelSpec(axes={"*.weight": (None, None)}, blocks=["inner"])


def test_a_module_computes_with_what_the_form_makes_of_its_parameter():
    precision = Precision("float32", "bfloat16", "float32")
    (model,) = plait.apply(Model(), SPEC, [InBytes()], precision=precision).parts
    result = model(torch.eye(2, dtype=torch.bfloat16))
    assert torch.equal(result, torch.tensor([[1.27, 0.0], [0.5, 2.54]], dtype=torch.bfloat16))
    result.sum().backward()
    assert torch.equal(model.inner.weight.grad, torch.ones(2, 2))
    assert model.inner.weight[0, 1] == torch.tensor(0.503)


@attrs.define(slots=False)
class Ghost:
    """Adds ranks with rows of their own, and claims to shard parameters."""

    name, claims = "ghost", ("gradient_sum", "parameter_sharding")

    @hookimpl
    def build_mesh(self):
        return [plait.MeshAxis("ghost", 2, splits="batch")]


@attrs.define(slots=False)
class Late:
    name = "late"

    @hookimpl
    def parallelize(self, model):
        plait.set_wire_form(model.inner, "weight", Bytes())


class Again(InBytes):
    name = "again"


def tied():
    model = Model()
    model.outer.weight = model.inner.weight
    return model


@pytest.mark.parametrize(
    ("made", "strategies", "ranks", "says"),
    [
        (Model, [InBytes(), Ghost()], 2, "'inner.weight': strategy 'ghost' shards parameters and did not take it"),
        (Model, [Late()], 1, "'inner.weight': phase 'model' was over"),
        (Model, [InBytes(), Again()], 1, "'weight' of a Linear gets a second wire form"),
        (tied, [InBytes()], 1, "'inner.weight' has a wire form and is tied to 'outer.weight'"),
    ],
)
def test_a_form_that_would_not_act_is_refused(made, strategies, ranks, says):
    with simulated(ranks), pytest.raises(plait.PlaitError) as caught:
        plait.apply(made(), SPEC, strategies)
    assert says in str(caught.value)
