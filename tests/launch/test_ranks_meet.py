"""Clocks of machines that meet, and what a rank reports if something fails before all are together."""

import collections
import datetime
import json
import time
import types
from typing import Any

import pytest

from plait.check import prepare
from plait.contract.errors import PlaitError
from plait.host import compose
from plait.launch import handler, rank, rank_end
from plait.records.run_folder import RunFolder
from plait.system.errors import unpacked


@pytest.fixture
def end_of(tmp_path, monkeypatch):
    """What the rank returns and reports if `prepare_together` raises the error."""
    node = tmp_path / "config.json"
    node.write_text(json.dumps({"config": compose(["strategy=[]"]).plain(), "files": {}}))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("PLAIT_SCRATCH", str(tmp_path))
    monkeypatch.setattr(rank, "_wait_for_rank_0", lambda: None)

    def end(error):
        def raises(*_):
            raise error

        monkeypatch.setattr(prepare, "prepare_together", raises)
        outcome = rank._under_elastic(RunFolder(tmp_path / "runs" / "a"), node)
        return outcome, rank_end.read(tmp_path)

    return end


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("Gloo connectFullMesh failed: timed out connecting"), "lost"),
        (ConnectionRefusedError(111, "Connection refused"), "failed"),
    ],
)
def test_an_error_of_the_network_may_pass(end_of, error, kind):
    outcome, ends = end_of(error)
    assert (outcome.kind, outcome.rank) == ("failed", 1)
    assert [(end.kind, end.repeats) for end in ends.values()] == [(kind, False)]


def test_a_mistake_would_repeat(end_of):
    _, ends = end_of(KeyError("x"))
    assert [(end.kind, end.repeats) for end in ends.values()] == [("failed", True)]


def test_a_refusal_is_for_the_launcher(end_of, tmp_path):
    outcome, ends = end_of(PlaitError("the machines differ").at("run.name"))
    assert (outcome, ends) == (None, {})
    assert str(unpacked((tmp_path / "problem").read_text())) == "the machines differ"


def state_holder(backend=None):
    beat = datetime.timedelta(seconds=handler.BEAT)
    settings = types.SimpleNamespace(keep_alive_interval=beat, keep_alive_max_attempt=handler.GIVEN_UP // handler.BEAT)
    holder: Any = handler._StateHolder(backend, settings)
    holder.seen = {}
    return holder


def test_machines_that_meet_ask_the_store_at_every_look():
    """torch answers from what it learned up to a second ago; each of two machines that wait for the other lost that."""
    asked: list[None] = []
    holder = state_holder(types.SimpleNamespace(get_state=lambda: asked.append(None)))
    with handler._short_pauses(holder):
        holder.sync()
        holder.sync()
    assert len(asked) == 2
    holder.sync()
    assert len(asked) == 2


def test_clocks_of_machines_differ(monkeypatch):
    """A machine is there as long as its signs of life change, whatever time of day they name."""
    holder = state_holder()
    clock, there = time.monotonic(), holder.state.last_heartbeats
    for seconds, since, present in ((0, 0, True), (14, 0, True), (16, 0, False), (20, 1, True), (34, 1, True)):
        sign = datetime.datetime(2001, 1, 1, 0, 0, since, tzinfo=datetime.UTC)
        holder.state.last_heartbeats = there | {"beta": sign}
        holder.state.wait_list = {"beta"}
        with monkeypatch.context() as now:
            now.setattr(handler.time, "monotonic", lambda: clock + seconds)  # noqa: B023
            holder._sanitize()
        assert ("beta" in holder.state.wait_list) == present, seconds
        assert holder.state.last_heartbeats == ({"beta": sign} if present else {})


Node = collections.namedtuple("Node", "addr")
ALPHA, BETA = Node("alpha"), Node("beta")


def looking(*members) -> Any:
    """The handler of machine ALPHA, which has met `members`."""
    looks: Any = handler.MeetingHandler.__new__(handler.MeetingHandler)
    state = types.SimpleNamespace(participants={}, wait_list=set(), last_heartbeats={})
    looks._state_holder, looks._looked, looks._beats = types.SimpleNamespace(state=state), time.monotonic(), {}
    looks._counts, looks._this_node, looks.known, looks.members = [1, 2], ALPHA, {}, {*members}
    return looks


@pytest.mark.parametrize(
    ("gaps", "gone"), [([3, 3], False), ([3, 3, 3], True), ([60], False), ([0.5] * 9, False), ([0.5] * 11, True)]
)
def test_who_is_silent_is_named_by_a_slow_machine_too(monkeypatch, gaps, gone):
    """A busy machine looks late every time. One late look alone says nothing: this machine may have been stopped."""
    looks, clock = looking(ALPHA, BETA), [time.monotonic()]
    monkeypatch.setattr(handler.time, "monotonic", lambda: clock[0])
    looks._state_holder.state.last_heartbeats = {ALPHA: 1, BETA: 1}
    for gap in (0, *gaps):
        clock[0] += gap
        looks._note_beats(looks.members)
    assert looks.gone() == (["beta"] if gone else [])
    looks._state_holder.state.last_heartbeats = {ALPHA: 2, BETA: 2}
    looks._note_beats(looks.members)
    assert looks.gone() == []


def test_a_look_outlives_the_members_of_the_last_start(monkeypatch):
    """The main thread forgets them for the next rendezvous, while another thread asks who is there."""
    looks = looking(ALPHA)

    def forget(self):
        self.members = None
        return 0

    monkeypatch.setattr(handler.DynamicRendezvousHandler, "num_nodes_waiting", forget)
    looks.look()
    assert looks.waiting == 0
