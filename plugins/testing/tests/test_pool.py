"""Ranks that wait for a core are not taken for ranks that hang."""

import os
import time
from pathlib import Path

import pytest


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
