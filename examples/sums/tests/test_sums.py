"""Samples follow from their number: on any number of ranks, after any resume, and held-out ones are others."""

import pytest
import torch
from plait_sums import Sums

RUN = (
    *("train", "run.name=r", "data=sums", "launch.device=cpu", "model.n_layers=1", "model.dim=32", "train.seq_len=32"),
    *("train.local_batch_size=2", "train.global_batch_size=8", "validation.interval=4", "metrics.tensorboard=false"),
)


def opened(share=0, shares=1, size=8, **options):
    return Sums(**options).open(seq_len=64, seed=3, global_batch_size=size, dp=(share, shares))


def test_what_a_sample_is():
    batch = opened(attention="document").take(5)
    text = bytes(batch.tokens[0].tolist()).decode()
    for line in text.splitlines()[:-1]:
        left, _, right = line.partition("=")
        a, b = left.split("+")
        assert (len(a), len(b), int(a) + int(b)) == (2, 2, int(right))
    labels, following = batch.labels[:, :-1], batch.tokens[:, 1:]
    assert (labels[labels >= 0] == following[labels >= 0]).all()
    starts = batch.positions == 0
    assert (batch.labels[:, :-1][starts[:, 1:]] == -100).all()


def test_any_number_of_ranks_and_any_batch_takes_the_same_samples():
    whole = opened().take(16).tokens
    assert torch.equal(torch.cat([opened(i, 4).take(16).tokens for i in range(4)]), whole)
    assert torch.equal(torch.cat([opened(size=4).take(n).tokens for n in (16, 20)]), whole)
    assert not torch.equal(opened().validation(0).tokens, whole)
    assert torch.equal(opened().validation(0).tokens, opened().validation(0).tokens)


@pytest.mark.slow
def test_a_run_resumes_with_the_next_samples(plait_project):
    done = plait_project(
        *RUN, "train.steps=8", "checkpoint.interval=4", "run.name=whole", "schedule.decay_steps=0", ranks=1
    )
    assert (done.code, done.err) == (0, "")
    for steps in (4, 8):
        done = plait_project(*RUN, f"train.steps={steps}", "schedule.decay_steps=0", ranks=1)
        assert (done.code, done.err) == (0, "")
    losses = [[row["loss"] for row in plait_project.rows(name)] for name in ("whole", "r")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("override", "sentence"), [("data.digits=0", "data.digits"), ("data.digit=3", "data.digit")])
def test_what_is_refused(plait_project, override, sentence):
    done = plait_project(*RUN, override)
    assert done.code == 1
    assert sentence in done.err
