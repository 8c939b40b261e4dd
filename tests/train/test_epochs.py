"""The line about epochs at the start of a run."""

from types import SimpleNamespace
from typing import Any

import pytest

from plait.train.epochs import said_of_epochs


def batches(epoch: int | None, sources: dict[str, int], size: int = 8, texts: int | None = None) -> Any:
    """Of data whose epoch has so many samples. sources: column -> samples of a whole pass, of which each batch takes
    its part."""
    return SimpleNamespace(
        epoch=epoch,
        texts=texts,
        global_batch_size=size,
        after=lambda samples, steps: samples + steps * size,
        passes=lambda taken: {name: taken / each for name, each in sources.items()},
    )


@pytest.mark.parametrize(
    ("given", "taken", "step", "steps", "said"),
    [
        (batches(16, {"epoch": 16}), 0, 0, 140, "an epoch is 2 steps; 140 steps are 70 epochs"),
        (batches(87, {"epoch": 87}), 0, 0, 22, "an epoch is 10.9 steps; 22 steps are 2.02 epochs"),
        (batches(8, {"epoch": 8}), 0, 0, 1, "an epoch is 1 step; 1 step is 1 epoch"),
        (batches(16, {"epoch": 16}), 32, 2, 4, "an epoch is 2 steps; 4 steps are 3 epochs"),  # larger batches before
        (
            batches(None, {"epoch/web": 320, "epoch/chat": 16}),
            *(0, 0, 4),
            "4 steps are 0.1 epochs of web, 2 epochs of chat",
        ),
        (
            batches(1, {"epoch": 1}, 128),
            *(0, 0, 2),
            "an epoch is 0.00781 steps; 2 steps are 256 epochs; a step takes 128 samples, of 1: a smaller "
            "train.global_batch_size makes more steps, and a smaller train.seq_len more samples",
        ),
        (
            batches(4, {"epoch": 4}, 8, texts=4),
            *(0, 0, 2),
            "an epoch is 0.5 steps; 2 steps are 4 epochs; a step takes 8 samples, of 4: a smaller "
            "train.global_batch_size makes more steps",
        ),
    ],
)
def test_a_run_says_how_long_an_epoch_is(given: Any, taken: int, step: int, steps: int, said: str) -> None:
    assert said_of_epochs(given, taken, step, steps) == f"data: {said}"


def test_of_a_stream_nothing_is_known() -> None:
    assert said_of_epochs(batches(None, {}), 0, 0, 140) == ""
