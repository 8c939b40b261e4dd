"""Copies of the state for a save: into locked memory, on a stream of their own."""

import warnings

import pytest
import torch

from plait.checkpoint.staging import Staging

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")]


def test_copies_go_to_locked_memory_with_one_wait() -> None:
    state, staging = {"a": torch.randn(300, 40, device="cuda"), "b": torch.randn(7, device="cuda")}, Staging()
    for _ in range(2):  # the first copy too
        for tensor in state.values():
            tensor.add_(1)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                staged = staging.copy(state)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(waits) == 1
        assert staged["a"].is_pinned()
        assert all(torch.equal(staged[key], tensor.cpu()) for key, tensor in state.items())
