"""What is plait-ddp's alone: its buckets, and parameters that some ranks have no gradient of."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from plait_ddp import Ddp
from torch import nn

import plait
from plait import ModelSpec
from plait.ops import Normal, cross_entropy_sum
from plait.testing import Counting, Trial, assert_same, batch, forward_backward, train

SMALL = {"bucket_mb": 0.01}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "trial", [pytest.param(Trial(compile="aot_eager", remat="full"), marks=pytest.mark.slow), Trial("odd", micro=2)]
)
def test_many_buckets_equal_one_process(plait_ranks, world, trial):
    (one,) = plait_ranks.run(train, Trial(trial.model), world=1)
    assert_same(plait_ranks.run(train, trial, {"ddp": SMALL}, world=world), one)


def counted(options):
    trial = Trial()
    applied = trial.apply({"ddp": options})
    (model,) = applied.parts
    tokens, labels = batch(0)
    with Counting(applied.mesh) as counting:
        cross_entropy_sum(model(tokens), labels).backward()
    (reduced,) = counting.found()
    return reduced.count, reduced.elements, [p.numel() for p in applied.parameters()]


@pytest.mark.parametrize("megabytes", [25, 0.05, 1e-6])
def test_a_bucket_is_full_at_its_size(plait_ranks, megabytes):
    for count, elements, sizes in plait_ranks.run(counted, {"bucket_mb": megabytes}, world=2):
        buckets, size = 0, float("inf")
        for numel in reversed(sizes):
            if size >= megabytes * 2**20:
                buckets, size = buckets + 1, 0
            size += 8 * numel
        assert (count, elements) == (buckets, sum(sizes))
        assert {25: count == 1, 0.05: 1 < count < len(sizes), 1e-6: count == len(sizes)}[megabytes]


class Branching(nn.Module):
    """`used` takes part on every rank, `sometimes` where it is told to, `never` nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.sometimes, self.used = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x, both):
        return self.used(x) + (self.sometimes(x) if both else 0)

    def spec(self):
        return ModelSpec(axes={"*.weight": ("embed", "embed")}, init={"*.weight": Normal(0.1)})


def without_gradients(options):
    with torch.device("meta"):
        model = Branching()
    plait.apply(model, model.spec(), [Ddp(**options)])
    rank = dist.get_rank()
    for repeat in range(2):
        model(torch.full((1, 4), rank + 1.0), both=rank == repeat).sum().backward()
    return {name: None if p.grad is None else p.grad.unique().tolist() for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"bucket_mb": 1e-6}])
def test_a_parameter_that_only_one_rank_used(plait_ranks, options):
    """Two backward passes: of the first `sometimes` has a gradient on rank 0 alone, of the second on rank 1."""
    for found in plait_ranks.run(without_gradients, options, world=2):
        assert found == {"never.weight": None, "sometimes.weight": [1.0 + 2.0], "used.weight": [2 * (1.0 + 2.0)]}


def leftovers():
    trial = Trial()
    applied = trial.apply({"ddp": {}})
    forward_backward(applied, trial, 0)
    param = weakref.ref(applied.parameters()[0])
    del applied
    gc.collect()
    return param() is None


def test_its_hooks_keep_no_model_alive(plait_ranks):
    assert plait_ranks.run(leftovers, world=2) == [True, True]
