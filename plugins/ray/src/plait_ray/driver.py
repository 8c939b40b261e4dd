"""Starts an actor on each node, prints what machine 0 prints, and replaces nodes that are lost."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from plait import PlaitError
from plait.host import one_line
from plait_ray.cluster import Need, nodes, room, shown
from plait_ray.launcher import VARIABLES
from plait_ray.machine import PASSED, Machine, Place

PATIENCE = 10.0  # seconds without a line
POLL = 0.5  # seconds
SIGNALLED = 128  # exit codes above tell of a signal
NODE = "ray.io/node-id"  # Ray's label of a node


def check(launch: Any) -> None:
    """Raises PlaitError for what `launch` cannot say here."""
    fits: dict[str, tuple[Any, ...]] = {"mode": ("auto", "ray"), "rdzv_endpoint": (None,)}
    for key, values in fits.items():
        if (value := getattr(launch, key)) not in values:
            raise PlaitError(f"launch.{key}={value}, but `plait ray` starts the machines: leave it out").at(
                f"launch.{key}", value, fits=values
            )


def wanted(launch: Any, address: str, pack: bool, wait: bool) -> Need:
    """What each machine needs. wait: for nodes that the cluster does not have yet.

    Raises PlaitError if it has too few.
    """
    gpus = nodes("GPU")
    kind = "GPU" if launch.device not in ("cpu", "auto") or (launch.device == "auto" and any(gpus)) else "CPU"
    least, count = launch.machines[0], launch.nproc_per_node
    if count == "auto":
        count = max(1, gpus[min(least, len(gpus)) - 1]) if kind == "GPU" else 1
    need = Need(kind, count)
    if (fits := room(need, pack)) < least and not wait:
        raise PlaitError(
            f"launch.nnodes={launch.nnodes} needs {least} node{'s' * (least != 1)} with {need} each, but the Ray "
            f"cluster at {address} has {fits} such: its nodes have {', '.join(map(str, nodes(kind)))} {kind}s; add "
            "nodes, ask for fewer, or add --wait if nodes will come"
        ).at("launch.nnodes", launch.nnodes, fits=f"at most {fits}")
    return need


@attrs.define(eq=False)
class Member:
    """One machine of the run: a bundle of a placement group, and the actor on it. number: None until it begins."""

    group: PlacementGroup
    bundle: int
    number: int | None = None
    actor: Any = None
    place: Place | None = None  # once it is known
    begun: bool = False
    code: int | None = None  # once it has ended


class Driver:
    """One run. need: of each machine. overrides: of `plait train`. say: prints a line."""

    def __init__(self, launch: Any, need: Need, overrides: list[str], pack: bool, say: Callable[[str], None]) -> None:
        self.launch, self.need, self.overrides, self.pack, self.say = launch, need, overrides, pack, say
        self.members: list[Member] = []
        self.groups: list[PlacementGroup] = []
        self.pending: dict[Any, tuple[Member, str]] = {}  # what an actor will answer -> whose it is, and of what method
        self.asked: list[int] = []  # signals
        self.sent = 0  # of them
        self.lost = 0  # nodes that count as restarts
        self.endpoint: tuple[str, int] | None = None  # where the machines meet
        self.met = False  # whether the first of them listens there
        self.printed: dict[str, Member] = {}  # a line -> the machine that said it first
        self.said = time.monotonic()  # when a wait was last told of

    def run(self) -> int:
        """The run's exit code."""
        with self._signals():
            self._ask_for_least()
            try:
                return self._run()
            finally:
                self._give_back()

    def _ask_for_least(self) -> None:
        """Ask for as many machines as must begin, all at once."""
        least = self.launch.machines[0]
        self._add(least, "PACK" if self.pack or least == 1 else "STRICT_SPREAD")

    def _give_back(self) -> None:
        for member in self.members:
            self._end(member)
        for group in self.groups:
            remove_placement_group(group)
        self.members, self.groups, self.endpoint, self.met = [], [], None, False

    def _run(self) -> int:
        ended = None
        while True:
            if len(self.members) < self.launch.most and all(member.place for member in self.members):
                taken = [member.place.node for member in self.members if member.place and not self.pack]
                self._add(1, "PACK", taken)
            for member in self.members:
                if member.actor is None and not self.asked:
                    self._create(member)
            for ref in self._ready():
                if ref in self.pending:  # not of an actor that was ended meanwhile
                    self._answered(ref)
            for number in self.asked[self.sent :]:
                self.sent += 1
                if not self._pass_on(number):
                    print(f"plait: stopped by {signal.Signals(number).name}, before training began", file=sys.stderr)
                    return 128 + number
            self._say_what_is_missing()
            if (code := self._first().code) is not None:
                ended = ended or time.monotonic()
                alone = all(member.code is not None for member in self.members if member.begun)
                if alone or time.monotonic() > ended + self.launch.grace_seconds:
                    return code if code >= 0 else 128 - code

    def _first(self) -> Member:
        """The machine whose exit code is the run's: of an elastic run, the first that did not leave by a signal."""
        stay = (member for member in self.members if member.begun and 0 <= (member.code or 0) <= SIGNALLED)
        return next(stay, self.members[0]) if self.launch.elastic else self.members[0]

    def _ready(self) -> list[Any]:
        """What was answered; waits for it a moment."""
        if not self.pending:
            time.sleep(POLL)
            return []
        return list(ray.wait(list(self.pending), timeout=POLL)[0])

    def _add(self, machines: int, strategy: str, taken: Sequence[str] = ()) -> None:
        """Ask for more machines. taken: nodes that are not wanted."""
        others = [{NODE: f"!in({','.join(taken)})"}] * machines if taken else None
        group = placement_group([self.need.bundle] * machines, strategy, bundle_label_selector=others)
        self.groups.append(group)
        self.members += [Member(group, bundle) for bundle in range(machines)]

    def _create(self, member: Member) -> None:
        where = PlacementGroupSchedulingStrategy(
            placement_group=member.group, placement_group_bundle_index=member.bundle
        )
        key = f"num_{self.need.kind.lower()}s"
        options = {"num_cpus": 0, key: self.need.count, "max_concurrency": 4, "scheduling_strategy": where}
        member.actor = ray.remote(Machine).options(**options).remote()
        self._ask(member, "place")

    def _ask(self, member: Member, method: str, *arguments: Any) -> None:
        self.pending[getattr(member.actor, method).remote(*arguments)] = member, method

    def _answered(self, ref: Any) -> None:
        member, method = self.pending.pop(ref)
        try:
            answer = ray.get(ref)
        except ActorUnavailableError:
            self._ask(member, "output")  # Ray does not reach it at the moment, and later knows whether it is lost
            return
        except ActorDiedError as error:
            if error.actor_init_failed:
                raise PlaitError(f"Ray cannot start Plait on a node: {one_line(error)}") from error
            self._is_lost(member, f"the node {member.place} is lost, or Plait's actor there was killed")
            return
        if method == "place":
            member.place = answer
            self._begin_placed()
        elif method == "begin":
            if answer:
                raise PlaitError(f"the node {member.place}: {answer}")
            if not self.met:
                self.met = True
                self._begin_placed()
            self._ask(member, "output")
        elif method == "output":
            texts, code = answer
            self._print(member, texts)
            if code == -signal.SIGKILL and not self.asked:
                self._is_lost(member, f"the launcher on the node {member.place} was killed")
            elif code is None:
                self._ask(member, "output")
            else:
                member.code = code

    def _begin_placed(self) -> None:
        """Start the run on all machines whose place is known, once as many are as must begin. Machine 0, where they
        meet, is this node if it is one of them: if it is lost, so is this command. It begins first, and the
        others once it listens."""
        if self.endpoint is None:
            here, gang = ray.get_runtime_context().get_node_id(), self.groups[0]
            if not all(member.place for member in self.members if member.group is gang):
                return
            self.members.sort(
                key=lambda member: (member.group is not gang, member.place is None or member.place.node != here)
            )
            first = self.members[0].place
            assert first is not None
            self.endpoint = first.ip, first.port
        host, port = self.endpoint
        for index, member in enumerate(self.members):
            if member.place is None or member.begun or (index and not self.met):
                continue
            member.begun = True
            member.number = index if member.number is None else member.number
            self.say(f"ray: machine {member.number} is {member.place}")
            told = {"nnodes": self.launch.nnodes, "index": member.number, "nproc_per_node": self.need.count}
            if self.launch.most > 1:
                told["rdzv_endpoint"] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            env = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
            env |= {VARIABLES[key]: str(value) for key, value in told.items()}
            listens = None if self.met or self.launch.most == 1 else self.endpoint
            self._ask(member, "begin", os.getcwd(), [*self.overrides, "launch.mode=ray"], env, listens)

    def _print(self, member: Member, texts: list[tuple[int, str]]) -> None:
        """Each line once: all machines say how the run begins and ends, and one of them its steps."""
        for number, text in texts:
            if self.printed.setdefault(text, member) is member:
                self.say(text.removesuffix("\n")) if number == 1 else print(text, end="", flush=True, file=sys.stderr)

    def _is_lost(self, member: Member, what: str) -> None:
        """Wait for another node in the place of one that is lost. Raises PlaitError if the run ends. what: happened."""
        begun, most = member.begun, self.launch.max_restarts
        self._end(member)
        if not begun:  # Ray takes a while to know that a node is lost, and then finds another
            return
        if self.asked:
            member.code, member.begun = 128 + self.asked[0], True
            return
        self.said = time.monotonic()
        if self.launch.elastic and any(each.begun for each in self.members):
            self.members.sort(key=lambda each: not each.begun)  # those that go on come first
            self.say(f"ray: {what}; the run goes on with the others")
            return
        self.lost += 1
        if self.lost > most:
            raise PlaitError(f"{what}; launch.max_restarts={most} allows no further restart").at(
                "launch.max_restarts", most, fits=f"at least {self.lost}"
            )
        self.say(f"ray: {what}; waiting for a node in its place (restart {self.lost} of {most})")
        if self.launch.elastic or member is self.members[0]:  # the others meet there
            self._give_back()
            self._ask_for_least()

    def _end(self, member: Member) -> None:
        self.pending = {ref: whose for ref, whose in self.pending.items() if whose[0] is not member}
        if member.actor is not None:
            ray.kill(member.actor)
        member.actor, member.place, member.begun, member.code = None, None, False, None

    def _pass_on(self, number: int) -> bool:
        """Send the signal to the run's machines. False if none has begun."""
        running = [member for member in self.members if member.begun and member.code is None]
        for member in running:
            member.actor.signal.remote(number)
        return bool(running)

    def _say_what_is_missing(self) -> None:
        least = self.launch.machines[0]
        missing = least - sum(member.place is not None for member in self.members)
        if missing <= 0 or self.asked:
            self.said = time.monotonic()
        elif time.monotonic() > self.said + PATIENCE:
            self.said = time.monotonic()
            self.say(f"ray: waiting for {missing} of {least} nodes with {self.need} each; {shown(self.need.kind)}")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Inside, signals that ask to stop are noted. Those that are ignored stay so."""
        numbers = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
        before = {each: signal.signal(each, lambda number, frame: self.asked.append(number)) for each in numbers}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
