"""Ranks that wait for a core are not taken for ranks that hang, and each run begins without what the last one left."""

import os
import time
from pathlib import Path

import pytest
import torch

from plait.ops.attention import document_mask
from plait_testing.pool import RankError


def compute(seconds):
    """`seconds` of processor time, on one core that all ranks share."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(own)})
    try:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
    finally:
        os.sched_setaffinity(0, own)
    return True


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="no kernel here says who waits for a core")
def test_ranks_that_got_no_core_do_not_hang(plait_ranks):
    began = time.monotonic()
    assert all(plait_ranks.run(compute, 0.5, world=4, timeout=1))  # alone each needs half of it
    assert time.monotonic() - began > 1


def compiled(stance):
    with torch.compiler.set_stance(stance):
        return torch.compile(document_mask, backend="eager")(torch.arange(4)[None]).sum().item()


def test_a_run_finds_no_code_that_another_compiled(plait_ranks):
    """It may hold the names of groups that have ended."""
    assert plait_ranks.run(compiled, "default", world=1) == [10]
    with pytest.raises(RankError, match="fail_on_recompile"):
        plait_ranks.run(compiled, "fail_on_recompile", world=1)
