"""Numerics contract 2: batch i is the same samples whatever the layout, and a resumed run loses and repeats none."""

from pathlib import Path

import numpy as np
import pytest
import torch

from plait.testing import raises_about
from plait_data.packed import PackedBatches
from plait_data.text import Text

T, G = 16, 12


def opened(
    corpus: Path, dp: tuple[int, int] = (0, 1), seq_len: int = T, seed: int = 0, g: int = G, **options
) -> PackedBatches:
    source = Text(path=str(corpus), **{"validation_fraction": 0.2, **options})
    return source.open(seq_len=seq_len, seed=seed, global_batch_size=g, dp=dp)


def ids(batches: PackedBatches, split: str) -> np.ndarray:
    """All token ids of a split, read without Plait's reader."""
    return np.fromfile(batches.folder / f"{split}.bin", np.uint16).astype(np.int64)


def whole(batches: PackedBatches, split: str) -> list[tuple[int, ...]]:
    """All samples of a split, cut naively."""
    tokens = ids(batches, split).tolist()
    return [tuple(tokens[at : at + T + 1]) for at in range(0, len(tokens) - T, T)]


def rows(batch) -> list[tuple[int, ...]]:
    return [(*tokens, labels[-1]) for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_shares_joined_are_the_batch_of_one_rank(corpus: Path, count: int) -> None:
    alone = opened(corpus)
    shares = [opened(corpus, (index, count)) for index in range(count)]
    for give in ("train", "validation"):
        for number in (0, 1, 7, 50, 1000):
            joined = torch.cat([getattr(share, give)(number).tokens for share in shares])
            assert joined.dtype == torch.int64
            assert joined.shape == (G, T)
            assert torch.equal(joined, getattr(alone, give)(number).tokens)
            labels = torch.cat([getattr(share, give)(number).labels for share in shares])
            assert torch.equal(labels, getattr(alone, give)(number).labels)


def test_labels_are_the_tokens_that_follow(corpus: Path) -> None:
    batch = opened(corpus).train(3)
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.positions is None


def test_every_epoch_gives_every_sample_once_in_another_order(corpus: Path) -> None:
    batches = opened(corpus)
    samples = whole(batches, "train")
    size = len(samples)
    assert size % G  # so that global batches span the borders of epochs
    steps = -(-3 * size // G)
    given = [row for step in range(steps) for row in rows(batches.train(step))]
    epochs = [given[at : at + size] for at in range(0, 3 * size, size)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(samples)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != samples


def test_a_global_batch_larger_than_the_corpus_takes_several_epochs(corpus: Path) -> None:
    size = len(whole(opened(corpus), "train"))
    batch = opened(corpus, g=3 * size).train(1)
    assert sorted(rows(batch)) == sorted(3 * whole(opened(corpus), "train"))


def test_a_batch_depends_on_seed_and_step_alone(corpus: Path) -> None:
    first = opened(corpus)
    for step in range(5):
        first.train(step)
    resumed = opened(corpus)
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(first.train(5).tokens, resumed.train(5).tokens)
    assert not torch.equal(opened(corpus, seed=1).train(5).tokens, resumed.train(5).tokens)


def test_validation_is_fixed_apart_and_wraps_round(corpus: Path) -> None:
    batches = opened(corpus)
    held = whole(batches, "validation")
    given = [row for index in range(15) for row in rows(batches.validation(index))]
    assert 1 < len(held) < 15 * G
    assert given == (held * (15 * G // len(held) + 1))[: 15 * G]
    assert [row for index in range(15) for row in rows(opened(corpus, seed=9).validation(index))] == given


def test_whole_documents_are_held_out_by_their_content(corpus: Path) -> None:
    def documents(batches: PackedBatches, split: str) -> list[bytes]:
        tokens = ids(batches, split)
        assert tokens[-1] == 256
        return [bytes(part[part != 256].tolist()) for part in np.split(tokens, np.flatnonzero(tokens == 256) + 1)][:-1]

    batches = opened(corpus)
    train, held = documents(batches, "train"), documents(batches, "validation")
    assert len(train) + len(held) == 200
    assert 20 < len(held) < 60
    assert not set(train) & set(held)
    shuffled = corpus.with_name("shuffled.jsonl")
    shuffled.write_text("".join(sorted(corpus.read_text().splitlines(keepends=True))))
    assert sorted(documents(opened(shuffled), "validation")) == sorted(held)


def test_attention_within_documents(corpus: Path) -> None:
    across, within = opened(corpus), opened(corpus, attention="document")
    for step in range(20):
        batch, plain = within.train(step), across.train(step)
        assert torch.equal(batch.tokens, plain.tokens)
        for row in range(G):
            position = 0
            for at in range(T):
                ends = batch.tokens[row, at] == 256
                assert batch.positions[row, at] == position
                assert batch.labels[row, at] == (-100 if ends else plain.labels[row, at])
                position = 0 if ends else position + 1
    assert (batch.labels == -100).any()


def test_without_a_split_validation_is_refused(corpus: Path) -> None:
    batches = opened(corpus, validation_fraction=0)
    with raises_about("data.validation_fraction", 0):
        batches.validation(0)


def test_a_global_batch_that_does_not_divide_is_refused(corpus: Path) -> None:
    with raises_about("train.global_batch_size", 12, "a multiple of 5"):
        opened(corpus, (0, 5))


def test_a_run_resumed_at_another_batch_size_loses_and_repeats_nothing(corpus: Path) -> None:
    """Over the end of an epoch, at two more sizes and counts of shares."""
    size = len(whole(opened(corpus), "train"))
    parts = [(12, 1, 0, 3), (8, 2, 36, 3), (24, 4, 60, 2 + size // 24)]  # G, shares, first sample, batches
    given: list[tuple[int, ...]] = []
    for g, count, first, batches in parts:
        shares = [opened(corpus, (index, count), g=g) for index in range(count)]
        assert len(given) == first
        given += [row for at in range(batches) for share in shares for row in rows(share.take(first + at * g))]
    assert len(given) > size
    assert given == rows(opened(corpus, g=len(given)).take(0))
