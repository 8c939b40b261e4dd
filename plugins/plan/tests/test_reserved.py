"""What torch's CUDA allocator reserves: its rules, one by one, and a plan that repeats a step's allocations."""

import pytest

from plait.host import compose
from plait_plan.engine import plan
from plait_plan.tracing.allocator import MIB, Allocator

KIB = 1024


@pytest.mark.parametrize(
    ("sizes", "expandable", "segments"),
    [
        ([1], 2, 2),  # the small pool grows by 2 MiB
        ([MIB, MIB, 512], 4, 4),
        ([MIB + 512], 20, 20),  # larger requests come from segments of 20 MiB
        ([9 * MIB, 9 * MIB], 20, 20),
        ([9 * MIB, 9 * MIB, 3 * MIB], 40, 40),
        ([10 * MIB], 20, 10),  # from 10 MiB on each gets a segment of its own, a multiple of 2 MiB
        ([11 * MIB, 13 * MIB], 40, 26),
        ([0], 0, 0),
    ],
)
def test_what_requests_reserve(sizes: list[int], expandable: int, segments: int) -> None:
    for way, wanted in ((True, expandable), (False, segments)):
        allocator = Allocator(way)
        for number, size in enumerate(sizes):
            allocator.take(number, size)
        assert allocator.reserved == wanted * MIB


def test_freed_neighbours_merge_and_the_smallest_block_that_fits_is_taken() -> None:
    allocator = Allocator(expandable=False)
    for name, size in {"a": 4, "b": 4, "c": 4, "d": 8}.items():
        allocator.take(name, size * MIB)
    assert allocator.reserved == 20 * MIB
    for name in "ab":
        allocator.give(name)
    allocator.take("of both", 8 * MIB)  # fits only where both were
    assert allocator.reserved == 20 * MIB
    allocator.give("c")
    allocator.give("d")
    allocator.take("whole", 12 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.take("more", 2 * MIB)
    assert allocator.reserved == 40 * MIB


def test_a_hole_that_is_too_small_is_not_used_and_expandable_segments_grow_at_their_end() -> None:
    for way, wanted in ((True, 80), (False, 90)):
        allocator = Allocator(way)
        allocator.take("first", 20 * MIB)
        allocator.take("second", 20 * MIB)
        allocator.give("second")
        allocator.take("larger", 50 * MIB)
        allocator.take("again", 10 * MIB)  # expandable: from the rest of the last page
        assert allocator.reserved == wanted * MIB


def test_streams_do_not_share() -> None:
    allocator = Allocator()
    allocator.take("x", 30 * MIB, stream=0)
    allocator.give("x")
    allocator.take("y", 30 * MIB, stream=0)
    assert allocator.reserved == 40 * MIB
    allocator.take("z", 1, stream=1)
    assert allocator.by_stream == {0: 40 * MIB, 1: 2 * MIB}


@pytest.mark.slow
def test_fsdp2_reserves_for_gradients_what_activations_cannot_use() -> None:
    """FSDP2 allocates sharded gradients and gathered parameters on streams of their own."""
    run = ["strategy=[fsdp2]", "train.local_batch_size=8", "train.seq_len=512", "validation.interval=0"]
    memory = plan(compose([*run, "cluster=h100"]), 4, every=True).memory
    assert memory.at.held["gradients"] < memory.gradients  # the peak is before backward is done
    for reserved in memory.reserved:
        assert reserved >= memory.peak + (memory.gradients - memory.at.held["gradients"])
