"""Kernels that give the same bits in every run."""

import os

import torch


def use_repeatable_kernels(wanted: bool) -> None:
    """In this process: torch selects them and refuses operations that have none, or no longer does."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be repeatable
        # torch would write NaN into all memory that it hands out, in 274 kernels per step of a small model. That finds
        # code that reads what nobody has written, but repeats no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(wanted)
