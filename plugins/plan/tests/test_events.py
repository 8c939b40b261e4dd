"""What overlaps what: all-gathers that are started early are waited for when they are read."""

import pytest

from plait.host import check, compose
from plait_plan.events import Event, play, play_again
from plait_plan.tracing.trace import trace

COMPUTE, OPEN = Event(3.0), Event(opens=True)
GATHER = Event(1.0, "dp", gathers=True, direct=True, beside=True)
SCATTER = Event(2.0, "dp", direct=True, beside=True)


def test_forward_hides_the_next_gather() -> None:
    """Each is started when the previous one has been read, and read before its block: only the first is seen."""
    assert play([GATHER, OPEN, COMPUTE] * 4, best=True) == 1.0 + 4 * 3.0
    assert play([GATHER, OPEN, COMPUTE] * 4, best=False) == 4 * (1.0 + 3.0)


def test_backward_hides_what_it_gathers_for_the_next_block_and_sums_of_the_last() -> None:
    """The gather for the next block is started before this one's backward, behind the sums of the block before: both
    take as long as one backward, so nothing is seen but the first gather and the last sum."""
    backward = [OPEN, GATHER, COMPUTE, SCATTER]
    assert play([GATHER, *backward * 3, OPEN, COMPUTE, SCATTER], best=True) == 1.0 + 4 * 3.0 + 2.0


def test_what_takes_longer_than_its_block_is_seen() -> None:
    slow = Event(5.0, "dp", gathers=True, direct=True, beside=True)
    assert play([slow, OPEN, COMPUTE] * 4, best=True) == 4 * 5.0 + 3.0


def test_other_axes_do_not_wait_for_each_other() -> None:
    other = Event(2.0, "tp", gathers=True)
    assert play([GATHER, OPEN, other, Event(waits=True), COMPUTE] * 2, best=True) == 1.0 + 2 * (2.0 + 3.0)


def test_sums_of_gradients_go_on_while_another_axis_is_waited_for() -> None:
    """Also if the clipping of gradients sends a functional collective along their axis."""
    inside, norm = Event(0.5, "tp"), Event(0.25, "dp")
    backward = [SCATTER, inside, Event(waits=True), COMPUTE]
    assert play([*backward * 3, norm, Event(waits=True)], best=True) == 3 * (0.5 + 3.0) + 0.25


@pytest.mark.parametrize("best", [True, False])
def test_what_is_played_again_takes_as_long_as_if_it_were_written_again(best: bool) -> None:
    events = [GATHER, OPEN, Event(2.0, "tp"), COMPUTE, SCATTER, Event(0.5), Event(waits=True), SCATTER]
    assert play_again(events, best, 4) == [play(events * times, best) for times in (1, 2, 3, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_each_gather_of_a_traced_step_is_opened_once(remat: str) -> None:
    config = check(compose(["model=llama3_debug", "strategy=[fsdp2]", f"remat.mode={remat}"]), 4).config
    found = trace(config, 4, 0, 512).operators
    gathers = [o for o in found if o.kind == "all_gather" and o.phase in ("forward", "backward", "recompute")]
    opens = [o for o in found if o.opens and o.phase in ("forward", "backward", "recompute")]
    assert len(gathers) == len(opens) > 5
    assert {o.name for o in opens} == {"fsdp::split_with_sizes_copy"}
    backward = [o for o in found if (o.opens or o.kind == "all_gather") and o.phase == "backward"]
    assert [bool(o.kind) for o in backward[:3]] == [True, False, True]  # one ahead


def test_ranks_that_share_the_batch_have_fewer_micro_batches_each() -> None:
    more = ["train.local_batch_size=2", "train.global_batch_size=12", "model.n_layers=1"]
    config = check(compose(["model=llama3_debug", "strategy=[fsdp2]", *more]), 2).config
    assert trace(config, 2, 0, 512).micro == (3, 2)  # the third is like the second
