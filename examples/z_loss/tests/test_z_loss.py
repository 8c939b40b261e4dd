"""z-loss is what its equation says, in every layout as in one process, and its weight is checked."""

import pytest
import torch
from plait_z_loss import ZLoss

import plait
from plait.testing import Trial, assert_same, train

TENSOR, FSDP2 = {"tensor_parallel": {"degree": 2}}, {"fsdp2": {}}
WEIGHTED = {"z_loss": {"weight": 0.1}}  # large, so that a mistake in it shows
SMALL = ("launch.device=cpu", "model.n_layers=1", "train.seq_len=16", "train.local_batch_size=2", "train.steps=2")


def test_the_equation():
    logits, labels = torch.randn(2, 5, 7, dtype=torch.float64), torch.randint(7, (2, 5))
    labels[0, :3] = -100
    found = ZLoss(0.1).summed(logits, labels, plait.Vocab(7))
    expected = 0.0
    for row, label in zip(logits.flatten(0, 1), labels.flatten(), strict=True):
        if label >= 0:
            log_z = row.exp().sum().log()
            expected += log_z - row[label] + 0.1 * log_z**2
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


def test_without_weight_it_is_cross_entropy(plait_ranks):
    (plain,) = plait_ranks.run(train, Trial(), world=1)
    (found,) = plait_ranks.run(train, Trial(loss={"z_loss": {"weight": 0.0}}), world=1)
    assert_same([found], plain)
    (other,) = plait_ranks.run(train, Trial(loss=WEIGHTED), world=1)
    assert other.losses[0] > plain.losses[0] + 0.1


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(
    ("strategies", "world"),
    [pytest.param(FSDP2, 2, marks=pytest.mark.slow), (TENSOR, 2)],
    ids=["fsdp2", "tensor_parallel"],
)
def test_as_one_process(plait_ranks, strategies, world, chunks):
    for name in strategies:
        pytest.importorskip(f"plait_{name}")
    (one,) = plait_ranks.once(train, Trial(loss=WEIGHTED), world=1)
    trial = Trial(loss=WEIGHTED, chunks=chunks, micro=2)
    assert_same(plait_ranks.run(train, trial, strategies, world=world), one)


def test_the_command(plait_project):
    done = plait_project("train", "loss=z_loss", "loss.function.z_loss.weight=-1.0", *SMALL)
    assert (done.code, done.err) == (1, "plait: loss.function.z_loss.weight must be >= 0: -1.0\n")
    done = plait_project("plugins", "--kind", "loss")
    assert done.code == 0
    assert "z_loss" in done.out
