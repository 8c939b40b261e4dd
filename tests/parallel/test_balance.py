"""Experts' balance: every token counted once, however a step is cut, recomputed, compiled and spread over ranks."""

import math
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.contract.errors import PlaitError
from plait.host import check, compose
from plait.ops import Normal, cross_entropy_sum, ones, zeros
from plait.parallel.expert_balance import Counted
from plait.parallel.state import canonical_state
from plait_testing import whole_run
from plait_testing.models import moe
from plait_testing.trial import SAMPLES, SEQ_LEN, Trial, batch, forward_backward, train

TRIAL = Trial("moe")
TOP_K, N_EXPERTS, LAYERS = 2, 8, 2


def by_kind(trace, kind):
    found = {name: tensor for name, tensor in trace.buffers.items() if name.endswith(f".{kind}")}
    assert len(found) == LAYERS
    return found


def same(traces, plain, *kinds):
    for trace in traces:
        for kind in kinds:
            for name, want in by_kind(plain, kind).items():
                assert torch.equal(trace.buffers[name], want), name


@pytest.fixture(scope="module")
def plain(plait_ranks):
    (trace,) = plait_ranks.run(train, TRIAL, world=1)
    return trace


def test_a_step_counts_every_copy_of_every_token(plain):
    for counts in by_kind(plain, "counts").values():
        assert counts.sum() == SAMPLES * SEQ_LEN * TOP_K
        assert counts.max() > counts.min()
    for bias in by_kind(plain, "bias").values():
        assert 0 < bias.abs().max() <= TRIAL.steps * 0.05 + 1e-6
    for seen in by_kind(plain, "seen").values():
        assert not seen.any()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"micro": 4}, marks=pytest.mark.slow),
        pytest.param({"remat": "full"}, marks=pytest.mark.slow),
        {"remat": "selective"},
        {"remat": "full", "micro": 2},
        pytest.param({"compile": "aot_eager"}, marks=pytest.mark.slow),
        pytest.param({"compile": "aot_eager", "remat": "full", "micro": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_cut_recomputed_compiled(plait_ranks, plain, changes):
    same(plait_ranks.run(train, attrs.evolve(TRIAL, **changes), world=1), plain, "counts", "bias")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("changes", [pytest.param({}, marks=pytest.mark.slow), {"micro": 2, "remat": "full"}], ids=str)
def test_ranks_that_see_other_tokens(plait_ranks, plain, world, changes):
    traces = plait_ranks.run(train, attrs.evolve(TRIAL, **changes), {"fsdp2": {}}, world=world)
    same(traces, plain, "counts", "bias")


@pytest.mark.slow
def test_ranks_that_see_the_same_tokens_count_once(plait_ranks, plain):
    same(plait_ranks.run(train, TRIAL, {"tensor_parallel": {}, "fsdp2": {}}, world=4), plain, "counts")


def collectives():
    """(all-reduces of a call of after_step, whether counts and bias changed by evaluation)"""
    applied = TRIAL.apply({"fsdp2": {}})
    (model,) = applied.parts
    optimizer = TRIAL.optimizer(applied.parameters())
    forward_backward(applied, TRIAL, 0)
    optimizer.step()
    from plait_testing.count import Counting

    with Counting(applied.mesh) as counting:
        applied.after_step(optimizer, 1)
    found = [(each.op, each.count, each.elements) for each in counting.found()]
    before = {name: b.clone() for name, b in model.named_buffers()}
    model.eval()
    with torch.no_grad():
        model(batch(1)[0].to(applied.device))
    changed = [name for name, b in model.named_buffers() if not b.equal(before[name])]
    return found, changed


def test_one_reduction_a_step_and_evaluation_counts_nothing(plait_ranks):
    for found, changed in plait_ranks.run(collectives, world=2):
        assert found == [("all_reduce", 1, LAYERS * N_EXPERTS)]
        assert changed == []


def balance_gradient(trial, strategies):
    """Gradients of the routers of a first step."""
    trace = train(attrs.evolve(trial, steps=1), strategies)
    return {name: grad for name, grad in trace.gradients.items() if "router" in name}


def without_loss():
    return moe(balance_loss=0.0)


def strong_loss():
    return moe(balance_loss=1.0)


@pytest.mark.parametrize(
    ("changes", "strategies", "world"),
    [
        *((changes, {}, 1) for changes in ({"micro": 4}, {"remat": "full"}, {"remat": "selective"})),
        *(({}, {name: {}}, 2) for name in ("fsdp2", "tensor_parallel")),
        pytest.param({}, {"fsdp2": {}}, 4, marks=pytest.mark.slow),
        pytest.param({}, {"tensor_parallel": {}, "fsdp2": {}}, 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_balance_loss_however_a_step_is_cut(plait_ranks, changes, strategies, world):
    """Ranks that see other tokens add up, those that see the same ones do not count it twice."""
    (want,) = plait_ranks.once(balance_gradient, Trial(strong_loss), {}, world=1)
    (none,) = plait_ranks.once(balance_gradient, Trial(without_loss), {}, world=1)
    for got in plait_ranks.run(balance_gradient, Trial(strong_loss, **changes), strategies, world=world):
        for name, grad in want.items():
            assert (grad - none[name]).norm() > 0.1 * grad.norm()  # it is there
            assert (got[name] - grad).norm() <= 1e-10 * grad.norm(), name


def plain_backward():
    applied = TRIAL.apply({})
    tokens, labels = batch(0)
    loss = cross_entropy_sum(applied.parts[0](tokens), labels)
    try:
        (loss / 100).backward()
    except PlaitError as error:
        return str(error)


def test_backward_without_a_scale_names_what_to_call(plait_ranks):
    (sentence,) = plait_ranks.run(plain_backward, world=1)
    assert "call applied.backward(loss_sum, tokens) instead" in sentence


def test_what_a_checkpoint_holds():
    state, _ = canonical_state(moe())
    kept = {key.rpartition(".")[2] for key in state if ".router." in key}
    assert kept == {"weight", "bias", "counts"}


class Gate(nn.Module):
    """A router of nobody's kind: no bias, no loss, three experts; update notes what it was given."""

    def __init__(self):
        super().__init__()
        for name in ("now", "seen", "counts"):
            self.register_buffer(name, torch.empty(3, dtype=torch.int64), persistent=name == "counts")
        self.told = []

    def forward(self, x):
        if self.training:
            self.now.copy_(torch.tensor([2, 1, 1]) * len(x))
        return x

    def update(self):
        self.told.append(self.counts.tolist())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.gates = nn.ModuleList([Gate(), Gate()])

    def forward(self, x):
        x = self.first(x)
        for gate in self.gates if len(x) > 1 else self.gates[:1]:  # of one sample the second sees nothing
            x = gate(x)
        return x


def strange():
    with torch.device("meta"):
        net: Any = Net()
    axes = {"first.weight": (None, None), "first.bias": (None,)}
    init = {"first.*": Normal(1.0), "gates.*.counts": ones, "gates.*.*": zeros}
    applied = plait.apply(net, plait.ModelSpec(axes, init=init, routers=["gates.*"]))
    (net,) = applied.parts
    optimizer = torch.optim.SGD(applied.parameters(), lr=0.1)
    for sizes in ((3, 2), (1, 4)):
        for size in sizes:
            applied.backward(net(torch.ones(size, 4)).sum(), 5)
        applied.after_step(optimizer, 1)
    return [gate.told for gate in net.gates], applied.balance.counted.row()


def test_a_router_of_ones_own(plait_ranks):
    ((first, second), row) = plait_ranks.run(strange, world=1)[0]
    assert first == [[10, 5, 5], [10, 5, 5]]
    assert second == [[10, 5, 5], [8, 4, 4]]
    assert row["experts/gates.0/max_over_mean"] == 1.5
    assert row.keys() == {f"experts/gates.{i}/{what}" for i in (0, 1) for what in ("max_over_mean", "entropy")}


def test_the_row_of_metrics():
    counted = Counted(torch.tensor([4, 4, 4, 4, 8, 0]), ["layers.1", "layers.2"], [4, 2])
    assert counted.row() == {
        "experts/layers.1/max_over_mean": 1.0,
        "experts/layers.1/entropy": 1.0,
        "experts/layers.2/max_over_mean": 2.0,
        "experts/layers.2/entropy": 0.0,
    }
    uneven = Counted(torch.tensor([3, 1]), ["x"], [2]).row()
    assert uneven["experts/x/entropy"] == pytest.approx(-(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25)))


@pytest.mark.slow
def test_a_run_writes_the_loads_and_resumes_the_balance(plait_ranks, tmp_path, monkeypatch):
    """Six steps at once, and as three and three: the same losses and loads to the last bit, of two ranks."""
    monkeypatch.chdir(tmp_path)
    small = ("model=deepseek_v3_debug", "model.dim=32", "model.n_layers=2", "model.bias_update=0.05")
    rows = []
    for name, parts in (("whole", ["train.steps=6"]), ("cut", ["train.steps=3", "train.steps=6"])):
        for steps in parts:
            more = (steps, "schedule.decay_steps=0", "checkpoint.load=latest", f"run.name={name}")
            node = check(compose(whole_run.overrides({"fsdp2": {}}, tmp_path, 2, *more, model=small)), 2).config
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "versions.json").write_text("{}")
            rows.append(plait_ranks.run(whole_run.run, node, tmp_path / name, world=2)[0])
    whole, _, second = rows
    keys = ["loss", "grad_norm", "experts/layers.1/max_over_mean", "experts/layers.1/entropy"]
    assert [row["step"] for row in second] == [4, 5, 6]
    for a, b in zip(whole[3:], second, strict=True):
        assert [a[key] for key in keys] == [b[key] for key in keys]
    for row in whole:
        assert 1 <= row["experts/layers.1/max_over_mean"] <= 4  # 2 of 8 experts
        assert 0 < row["experts/layers.1/entropy"] <= 1
    assert len({row["experts/layers.1/max_over_mean"] for row in whole}) > 1


def test_a_pattern_that_names_no_router_is_an_error(plait_ranks):
    assert plait_ranks.run(wrong_pattern, world=1) == [
        "the model's spec names 'layers.*.gate' in `routers`, but no module matches that pattern"
    ]


def wrong_pattern():
    model = TRIAL.build()
    try:
        plait.apply(model, attrs.evolve(model.spec(), routers=("layers.*.gate",)))
    except PlaitError as error:
        return str(error)
    finally:
        dist.barrier()
