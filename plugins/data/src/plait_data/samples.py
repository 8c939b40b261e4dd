"""Samples in a row of tokens, and batches of them."""

import numpy as np
import torch

from plait import IGNORE, Batch, PlaitError


def nothing_held_out() -> PlaitError:
    """The error if there is nothing to validate on."""
    return PlaitError(
        "nothing is held out for validation: raise data.validation_fraction, or set validation.interval=0"
    ).at("data.validation_fraction", 0, fits="more")


def windows(tokens: np.ndarray, seq_len: int) -> np.ndarray:
    """All samples in `tokens` (n,): a view (samples, seq_len + 1), each starting at the last token of the one
    before."""
    samples = max(len(tokens) - 1, 0) // seq_len
    width = tokens.itemsize
    return np.lib.stride_tricks.as_strided(tokens, (samples, seq_len + 1), (seq_len * width, width), writeable=False)


def to_batch(samples: np.ndarray, eod: int, attention: str) -> Batch:
    """A batch of samples (B, T + 1). With attention "document", no label asks the end token for the next document."""
    tokens, labels = samples[:, :-1].astype(np.int64), samples[:, 1:].astype(np.int64)
    if attention == "across":
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels))
    ends = tokens == eod
    labels[ends] = IGNORE
    place = np.arange(tokens.shape[1])
    starts = np.zeros_like(tokens)
    starts[:, 1:] = np.where(ends[:, :-1], place[1:], 0)
    positions = place - np.maximum.accumulate(starts, axis=1)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(positions))
