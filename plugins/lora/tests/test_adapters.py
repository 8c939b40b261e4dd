"""What is frozen, what trains, what is held and computed; and what is refused."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from plait.contract.config import Config
from plait.host import make_optimizer
from plait.parallel.assembly import assemble_model
from plait.strategies.registry import create, create_all
from plait.testing import Trial, forward_backward, is_about, raises_about, train, unequal
from plait_lora import Lora
from plait_lora.adapt import adapt
from plait_testing.models import llama3, moe

BOTH = {"fsdp2": {}, "tensor_parallel": {"degree": 2}}
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 1e-2}


def logits(trial, strategies):
    applied = trial.apply(strategies)
    with torch.no_grad():
        return applied.parts[0](trial.batch(0)[0])


@pytest.mark.parametrize("model", ["llama3", "moe"])
def test_before_the_first_step_it_is_the_base(plait_ranks, model):
    trial = Trial(model, dtype="float32")
    (base,) = plait_ranks.run(logits, trial, {}, world=1)
    (adapted,) = plait_ranks.run(logits, trial, {"lora": {}}, world=1)
    assert torch.equal(adapted, base)


@pytest.mark.parametrize(
    ("model", "beside", "world"),
    [("moe", {}, 1), *(pytest.param(model, BOTH, 4, marks=pytest.mark.slow) for model in ("llama3", "moe"))],
)
def test_twenty_steps_leave_the_base_as_it_was(plait_ranks, model, beside, world):
    """Bitwise, routers' bias too, and every adapter has moved."""
    trial = Trial(model, dtype="float32", steps=20)
    (base,) = plait_ranks.once(train, Trial(model, dtype="float32", steps=1), {}, world=1)
    for result in plait_ranks.run(train, trial, {"lora": {"rank": 2}, **beside}, world=world):
        assert unequal({name: result.final[name] for name in base.initial}, base.initial) is None
        moved = [name for name in result.final if not torch.equal(result.final[name], result.initial[name])]
        assert moved == [name for name in result.final if "lora_" in name]
        bias = [value for name, value in result.buffers.items() if name.endswith("router.bias")]
        assert len(bias) == (2 if model == "moe" else 0)
        assert all(not value.any() for value in bias)


def held(trial, strategies):
    """Bytes of gradients and of optimizer state after a step, and those that this rank's adapters have."""
    applied = trial.apply(strategies)
    optimizer = make_optimizer(ADAMW, applied.parameters())
    forward_backward(applied, trial, 0)
    grads = sum(nbytes(p.grad) for p in applied.parameters() if p.grad is not None)
    optimizer.step()
    state = [v for kept in optimizer.state.values() for k, v in kept.items() if k != "step"]
    named = [(name, p) for name, p in applied.parts[0].named_parameters() if "lora_" in name]
    kept = sum(len(group["params"]) for group in optimizer.param_groups)
    return grads, sum(map(nbytes, state)), sum(nbytes(p) for _, p in named), kept, len(named)


def nbytes(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def test_gradients_and_optimizer_are_of_adapters_alone(plait_ranks):
    whole = 4 * 2 * 2 * ((32 + 32) * 2 + (32 + 48) * 3)  # float32, rank 2, 2 layers: wq and wo; w1, w2 and w3
    answers = plait_ranks.run(held, Trial(dtype="float32"), {"lora": {"rank": 2}, **BOTH}, world=4)
    for grads, state, adapters, kept, count in answers:
        assert kept == count == 20
        assert grads == adapters < whole
        assert state == 2 * adapters
    assert sum(adapters for _, _, adapters, _, _ in answers) >= whole


class Products(TorchDispatchMode):
    """Notes the shapes that matrix products make."""

    def __init__(self):
        super().__init__()
        self.made = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if str(func) in ("aten.mm.default", "aten.addmm.default"):
            self.made.add(tuple(result.shape))
        return result


def products(trial, strategies):
    applied = trial.apply(strategies)
    with Products() as noted:
        forward_backward(applied, trial, 0)
    return noted.made


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2}}], ids=["without", "with"])
def test_no_gradient_of_a_matrix_is_computed(plait_ranks, lora):
    (made,) = plait_ranks.run(products, Trial(), lora, world=1)
    full = {(32, 32), (16, 32), (32, 48), (48, 32), (64, 32)}  # of the attention, the feed-forward and the head
    assert made & full == (set() if lora else full)


def test_a_model_with_values_keeps_them():
    """`plait.apply` gives it adapters of the same values as a model on meta gets."""
    model = llama3()
    made = assemble_model(model, model.spec(), create_all({"lora": {}}), Config(), 1, "cpu")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made.extend()
    assert unequal({name: p for name, p in model.named_parameters() if name in before}, before) is None
    b, a = model.get_parameter("layers.0.attention.wq.lora_B"), model.get_parameter("layers.0.attention.wq.lora_A")
    assert not b.any()
    assert float(a.detach().abs().max()) <= 1 / math.sqrt(32) < 2 * float(a.detach().abs().max())
    assert made.run.added == {name for name, p in model.named_parameters() if p.requires_grad}
    assert made.run.parameters == sum(p.numel() for p in model.parameters())


class Batched(nn.Module):
    """Experts that multiply by a loop of their own."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(8, 16, 32))

    def forward(self, x, counts):
        return torch.cat([rows @ w.mT for rows, w in zip(x.split(counts.tolist()), self.w1, strict=True)])


def assembled(model, options):
    return assemble_model(model, model.spec(), create_all({"lora": options}), Config(), 1, "cpu").extend()


AXES = ["ffn", "heads", "kv_heads"]
REFUSED = [
    ({"targets": ["heads", "widths"]}, "targets", AXES),
    ({"targets": []}, "targets", AXES),
    ({"targets": ["vocab"]}, "targets", AXES),
    ({"targets": ["kv_heads"], "rank": 17}, "rank", "at most 16"),
    ({"rank": 0}, "rank", None),
    ({"alpha": 0.0}, "alpha", None),
]


@pytest.mark.parametrize(("options", "key", "fits"), REFUSED, ids=str)
def test_what_does_not_fit_is_refused(options, key, fits):
    with raises_about(f"strategy.lora.{key}", options[key], *([fits] if fits else [])):
        assembled(Trial().build(), options)


@pytest.mark.parametrize(("target", "named"), [("embed", "Router"), ("ffn", "layers.1.feed_forward.experts.w1")])
def test_other_modules_are_refused_by_name(target, named):
    """The router's matrix, and experts that multiply by a loop of their own."""
    model = Trial("moe").build()
    model.layers["1"].feed_forward.experts = Batched().to("meta")
    with raises_about("strategy.lora.targets", [target]) as raised:
        assembled(model, {"targets": [target]})
    assert named in str(raised.value)


def operations(layers, strategies):
    """Per token: (of the products that a step computes, by the spec for rows of no tokens, for rows of 8)."""
    trial = Trial(lambda: llama3(n_layers=layers))
    applied = trial.apply(strategies)
    with FlopCounterMode(display=False) as counted:
        applied.parts[0](torch.zeros(1, 16, dtype=torch.int64)).sum().backward()
    model = trial.build()
    (spec,) = [create(name, options).extend(model, model.spec()) for name, options in strategies.items()]
    return counted.get_flop_counts()["Global"][torch.ops.aten.mm] // 16, spec.flops(0), spec.flops(8)


def test_the_operations_of_a_block_are_those_that_are_computed():
    """The spec counts the elements of two norms as products too."""
    short, long = (operations(layers, {"lora": {"rank": 4}}) for layers in (2, 3))
    computed, without, attention = (b - a for a, b in zip(short, long, strict=True))
    assert without == computed + 4 * 2 * 32
    assert attention - without == llama3(n_layers=1).spec().flops(8) - llama3(n_layers=1).spec().flops(0)


def test_operations_of_experts_are_those_that_a_token_visits():
    model, whole = moe(), moe().spec()
    spec: Any = adapt(Lora(rank=4, targets=["ffn"]), model, whole)
    stacked = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name and p.dim() == 3)
    others = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name and p.dim() == 2)
    assert spec.flops(0) == whole.flops(0) * 2 // 3 + 6 * (stacked * 2 // 8 + others)


def test_a_base_of_random_weights_is_refused_in_training_alone(plait_project):
    done = plait_project("train", "strategy=[lora]", "launch.device=cpu")
    is_about(done.error, "strategy.lora.random_base", False, (True,))
    assert plait_project("train", "strategy=[lora]", "strategy.lora.random_base=true", "launch.device=cpu").code == 99
    assert plait_project("inspect", "strategy=[lora]", "world=1").code == 0
