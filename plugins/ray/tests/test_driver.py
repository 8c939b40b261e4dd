"""What the driver does with the answers of machines, whoever gives them; a real cluster is in test_ray.py."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from plait.host import compose
from plait.testing import raises_about
from plait_ray import driver
from plait_ray.cluster import Need
from plait_ray.driver import Driver
from plait_ray.machine import Place

A, B, C = (Place(name * 8, f"host-{name}", f"10.0.0.{number}", 29500) for number, name in enumerate("abc", 1))
SAYS = ([(1, "begins\n")], None)
ENDS = ([], 0)
KILLED = ([], -signal.SIGKILL)


class Actor:
    """A machine that answers as its script says: its place, and what `output` returns one after the other."""

    def __init__(self, cluster: "Cluster", place: Place, *outputs: Any) -> None:
        places = [place] * cluster.has_room
        answers = {"place": iter(places), "begin": iter([""]), "output": iter(outputs), "signal": iter(())}
        for name, own in answers.items():
            setattr(self, name, SimpleNamespace(remote=lambda *given, n=name, i=own: cluster.asked(place, n, given, i)))


class Cluster:
    """Stands in for the module `ray`. scripts: of the machines, in the order in which they come. idle: what happens
    when there is nothing to answer, one after the other. has_room: for actors at all."""

    def __init__(self, *scripts: tuple[Any, ...], idle: tuple[Any, ...] = (), has_room: bool = True) -> None:
        self.scripts, self.idle, self.has_room = list(scripts), list(idle), has_room
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []
        self.answers: dict[object, Any] = {}
        self.waiting: list[object] = []
        self.killed: list[Actor] = []

    def asked(self, place: Place, name: str, given: tuple[Any, ...], answers: Any) -> object:
        ref = object()
        self.calls.append((place.host, name, given))
        for answer in answers:
            self.answers[ref] = answer
            return ref
        if name == "output":
            self.waiting.append(ref)
        return ref

    def end(self, answer: Any) -> None:
        """All machines whose script is over say this."""
        self.answers |= dict.fromkeys(self.waiting, answer)
        self.waiting.clear()

    def of(self, name: str) -> list[tuple[str, tuple[Any, ...]]]:
        return [(host, given) for host, called, given in self.calls if called == name]

    def remote(self, machine: type) -> Any:
        made = SimpleNamespace(remote=lambda: Actor(self, *self.scripts.pop(0)))
        return SimpleNamespace(options=lambda **_: made)

    def wait(self, refs: list[object], timeout: float) -> tuple[list[object], list[object]]:
        ready = [ref for ref in refs if ref in self.answers]
        if not ready:
            self.idle.pop(0)()
        return ready, []

    def get(self, ref: object) -> Any:
        if isinstance(answer := self.answers.pop(ref), Exception):
            raise answer
        return answer

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: B.node)


@pytest.fixture
def run(monkeypatch):
    """run(cluster, *overrides): (the exit code, what is said), of a run on this cluster."""

    def run(cluster: Cluster, *overrides: str) -> tuple[int, list[str]]:
        groups: list[object] = []
        monkeypatch.setattr(driver, "ray", cluster)
        monkeypatch.setattr(driver, "placement_group", lambda *_, **__: groups.append(object()) or groups[-1])
        monkeypatch.setattr(driver, "remove_placement_group", groups.remove)
        monkeypatch.setattr(driver, "PlacementGroupSchedulingStrategy", SimpleNamespace)
        said: list[str] = []
        launch = compose(["strategy=[]", *(f"launch.{each}" for each in overrides)]).launch
        one = Driver(launch, Need("CPU", 1), ["train.steps=1"], False, said.append)
        try:
            return one.run(), said
        finally:
            assert groups == [], "what was asked for is given back"
            assert len(cluster.killed) == len({host for host, *_ in cluster.calls})

    return run


def test_machine_0_is_here_and_begins_first(run, capsys):
    cluster = Cluster((A, SAYS, ENDS), (B, SAYS, ([(1, "step 1\n"), (2, "warns\n")], None), ENDS))
    code, said = run(cluster, "nnodes=2")
    assert code == 0
    assert said == [f"ray: machine 0 is {B}", f"ray: machine 1 is {A}", "begins", "step 1"]
    assert capsys.readouterr().err == "warns\n"
    (first, (_, words, env, listens)), (second, (_, _, other, nothing)) = cluster.of("begin")
    assert (first, second, listens, nothing) == ("host-b", "host-a", ("10.0.0.2", 29500), None)
    assert words == ["train.steps=1", "launch.mode=ray"]
    given = {name: (value, other[name]) for name, value in env.items() if name.startswith("PLAIT_RAY_")}
    assert given["PLAIT_RAY_INDEX"] == ("0", "1")
    assert ("10.0.0.2:29500",) * 2 in given.values()


def test_a_machine_whose_launcher_is_killed_is_replaced(run):
    scripts = (B, SAYS, ([(1, "step 1\n")], None)), (A, SAYS, KILLED), (C,)
    cluster: Cluster = Cluster(*scripts, idle=(lambda: cluster.end(ENDS),))
    code, said = run(cluster, "nnodes=2", "max_restarts=1")
    assert code == 0
    assert said[2:] == [
        *("begins", "step 1"),
        f"ray: the launcher on the node {A} was killed; waiting for a node in its place (restart 1 of 1)",
        f"ray: machine 1 is {C}",
    ]


@pytest.mark.parametrize("lost", [KILLED, ActorDiedError()])
def test_a_lost_machine_ends_a_run_that_may_not_restart(run, lost):
    with raises_about("launch.max_restarts", 0, "at least 1"):
        run(Cluster((B, SAYS), (A, SAYS, lost)), "nnodes=2", "max_restarts=0")


def test_an_elastic_run_goes_on_with_the_others(run):
    code, said = run(Cluster((B, SAYS, SAYS, SAYS, ENDS), (A, SAYS, KILLED), (C, ENDS)), "nnodes=1:2")
    assert code == 0
    assert f"ray: the launcher on the node {A} was killed; the run goes on with the others" in said


def test_a_machine_that_ray_does_not_reach_is_asked_again(run):
    code, said = run(Cluster((B, SAYS, ActorUnavailableError("for now", None), ENDS)), "nnodes=1")
    assert (code, said[1:]) == (0, ["begins"])


def asks(number: int) -> Any:
    return lambda: signal.raise_signal(number)


def test_a_signal_before_training_ends_the_command(run, capsys):
    code, said = run(Cluster((A,), (B,), idle=(asks(signal.SIGTERM),), has_room=False), "nnodes=2")
    assert said == []
    assert code == 128 + signal.SIGTERM
    assert "plait: stopped by SIGTERM, before training began\n" in capsys.readouterr().err


def test_a_signal_is_passed_on_and_machines_that_it_kills_are_not_lost(run):
    cluster: Cluster = Cluster((B, SAYS), (A, SAYS), idle=(asks(signal.SIGINT), lambda: cluster.end(KILLED)))
    code, said = run(cluster, "nnodes=2", "max_restarts=0")
    assert code == 128 + signal.SIGKILL
    assert sorted(cluster.of("signal")) == [("host-a", (signal.SIGINT,)), ("host-b", (signal.SIGINT,))]
    assert not any("lost" in line for line in said)
