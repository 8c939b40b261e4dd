"""The program over every operator of a block: which strategy each one takes, and how tensors move between them.

Variables are shares: of each operator's strategies, and of each tensor's moves from one placement to another. With
shares that are 0 or 1 a solution is an assignment; a solution with other shares costs less than any assignment, so the
least cost is a lower bound either way.
"""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from plait import PlaitError
from plait_autoparallel.advisor.links import Links, Placement

LIMIT = 300  # seconds for one program
SUMS = ("all_reduce", "reduce_scatter")
BOTH = (0, 1)  # ends of what a cluster achieves: upper, lower


class Unsolved(Exception):
    """The solver took too long; the message says how large the program is."""


@attrs.frozen
class Way:
    """A strategy of one operator on the whole mesh. seconds: with both ends of what the cluster achieves."""

    inputs: tuple[Placement, ...]
    results: tuple[Placement, ...]
    seconds: tuple[float, float]


@attrs.frozen
class ProblemStep:
    """An operator. used, made: numbers of values. choices: None: it is unknown, costs nothing and fits anything."""

    name: str
    used: tuple[int, ...]
    made: tuple[int, ...]
    choices: tuple[Way, ...] | None


@attrs.frozen
class Problem:
    """values: number -> (shape, bytes). stored: value -> its fixed placement: a parameter. ends: value -> the placement
    that it must get: a gradient. ties: (value that enters, value that leaves), which lie the same.
    moved: value -> "parameter" or "gradient", if its moves can run beside computation. unsummed: values that must not
    be summed over ranks: gradients before they have the dtype of sums.
    """

    links: Links
    steps: list[ProblemStep]
    values: Mapping[int, tuple[tuple[int, ...], int]]
    stored: Mapping[int, Placement]
    ends: Mapping[int, Placement]
    ties: list[tuple[int, int]]
    moved: Mapping[int, str]
    unsummed: frozenset[int] = frozenset()


@attrs.frozen
class Solution:
    """seconds: of the block. operators: name -> seconds of its choice and of moving its results. shares: of all
    variables. whole: whether each operator takes one strategy. variables: how many there are."""

    seconds: float
    operators: dict[str, float]
    whole: bool
    variables: int


class Program:
    """`Program(problem).solve()`; `solve(allowed)` with only those choices of each step for which `allowed` is true."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._costs: list[tuple[float, float]] = []  # of each variable, in the main stream of computation
        self._rows: list[tuple[dict[int, float], float, float]] = []
        self._beside: dict[tuple[str, tuple[int, ...]], dict[int, tuple[float, float]]] = {}
        self._names: dict[int, str] = {}
        self._picks: list[list[int]] = []
        self._build()

    def _new(self, cost: tuple[float, float] = (0.0, 0.0)) -> int:
        self._costs.append(cost)
        return len(self._costs) - 1

    def _row(self, terms: Mapping[int, float], low: float, high: float) -> None:
        self._rows.append((dict(terms), low, high))

    def _build(self) -> None:
        problem = self.problem
        lies: dict[int, dict[Placement, list[int]]] = {}  # value -> placement -> the variables that put it there
        takes: dict[int, list[dict[Placement, list[int]]]] = {}  # value -> for each user: placement -> variables
        for step in problem.steps:
            picks = []
            if step.choices is None:
                for value in step.made:
                    self._anywhere(value, lies)
                self._picks.append([])
                continue
            wants: list[dict[Placement, list[int]]] = [{} for _ in step.used]
            for choice in step.choices:
                pick = self._new(choice.seconds)
                picks.append(pick)
                self._names[pick] = step.name
                for want, placement in zip(wants, choice.inputs, strict=True):
                    want.setdefault(placement, []).append(pick)
                for value, placement in zip(step.made, choice.results, strict=True):
                    lies.setdefault(value, {}).setdefault(placement, []).append(pick)
            self._row(dict.fromkeys(picks, 1.0), 1.0, 1.0)
            self._picks.append(picks)
            for value, want in zip(step.used, wants, strict=True):
                takes.setdefault(value, []).append(want)
        for value, placement in problem.stored.items():
            lies[value] = {placement: [self._fixed()]}
        for value, placement in problem.ends.items():
            takes.setdefault(value, []).append({placement: [self._fixed()]})
        for enters, leaves in problem.ties:
            self._anywhere(enters, lies)
            takes.setdefault(leaves, []).append(lies[enters])
        for value, users in takes.items():
            if value not in lies:
                self._anywhere(value, lies)
            self._connect(value, lies[value], users)

    def _fixed(self) -> int:
        one = self._new()
        self._row({one: 1.0}, 1.0, 1.0)
        return one

    def _anywhere(self, value: int, lies: dict[int, dict[Placement, list[int]]]) -> None:
        shape, _ = self.problem.values[value]
        lies[value] = {p: [self._new()] for p in self.problem.links.placements(shape)}
        self._row({variables[0]: 1.0 for variables in lies[value].values()}, 1.0, 1.0)

    def _connect(self, value: int, lies: Mapping[Placement, list[int]], users: list[Any]) -> None:
        """The value moves from where it is made to where each user takes it. A move serves all users."""
        shape, size = self.problem.values[value]
        links = self.problem.links
        hidden = self.problem.moved.get(value, "")
        starts = links.placements(shape)
        moves = [(p, move) for p in starts for move in links.moves(shape, size, p)]
        if value in self.problem.unsummed:
            moves = [(p, move) for p, move in moves if move.kind not in SUMS]
        shared: list[int] = []
        if len(users) > 1:
            shared = [self._send(move, hidden) for _, move in moves]
        for want in users:
            balance: dict[Placement, dict[int, float]] = {p: {} for p in starts}
            for i, (start, move) in enumerate(moves):
                sent = self._new() if shared else self._send(move, hidden)
                balance[start][sent] = -1.0
                balance[move.after][sent] = 1.0
                if shared and move.kind:
                    self._row({shared[i]: 1.0, sent: -1.0}, 0.0, np.inf)
            for sign, ends in ((1.0, lies), (-1.0, want)):
                for placement, variables in ends.items():
                    for variable in variables:
                        terms = balance[placement]
                        terms[variable] = terms.get(variable, 0.0) + sign
            for terms in balance.values():
                if terms:
                    self._row(terms, 0.0, 0.0)

    def _send(self, move: Any, hidden: str) -> int:
        seconds = move.seconds
        if not hidden:
            both = (seconds[0] + move.latency, seconds[1] + move.latency)
            sent = self._new(both)
            if move.kind:
                self._names[sent] = f"collectives: {move.kind}"
            return sent
        sent = self._new()
        if move.kind:
            self._beside.setdefault((hidden, move.dims), {})[sent] = seconds
            self._names[sent] = f"collectives: {move.kind}"
        return sent

    def solve(self, allowed: Callable[[int, Way], bool] | None = None) -> Solution | None:
        """The least cost; None if no assignment is allowed. allowed: of a step's index and a choice."""
        from scipy.optimize import linprog
        from scipy.sparse import coo_matrix

        count = len(self._costs)
        total = count + 2  # and the seconds of the block with either end
        rows = list(self._rows)
        main = np.array(self._costs)
        for end in BOTH:
            rows.append(self._long(end, main[:, end], count + end))
            for dims in {dims for _, dims in self._beside}:
                rows.append(self._links_busy(end, dims, count + end))
        entries = [(r, c, x) for r, (terms, _, _) in enumerate(rows) for c, x in terms.items()]
        scale = 1e3  # milliseconds
        at, of, by = (np.array(each) for each in zip(*entries, strict=True))
        matrix = coo_matrix((by, (at, of)), shape=(len(rows), total)).tocsr()
        low, high = (np.array([row[i] for row in rows]) for i in (1, 2))
        same = low == high
        objective = np.zeros(total)
        objective[count:] = 0.5
        upper = np.full(total, np.inf)
        if allowed is not None:
            for i, (step, picks) in enumerate(zip(self.problem.steps, self._picks, strict=True)):
                for choice, pick in zip(step.choices or (), picks, strict=True):
                    if not allowed(i, choice):
                        upper[pick] = 0.0
        result: Any = linprog(
            objective, A_ub=-matrix[~same], b_ub=-low[~same], A_eq=matrix[same], b_eq=low[same],
            bounds=np.stack([np.zeros(total), upper], axis=1), method="highs", options={"time_limit": LIMIT},
        )  # fmt: skip
        if result.status == 2:
            return None
        if result.status == 1:
            raise Unsolved(f"no bound within {LIMIT} s; the program has {total:,} variables")
        if result.x is None:
            raise PlaitError(f"the solver of linear programs ended without a bound: {result.message}")
        shares = result.x[:count]
        picks = [pick for each in self._picks for pick in each]
        whole = bool(np.all(np.minimum(shares[picks], 1 - shares[picks]) < 1e-6))
        return Solution(float(result.fun) / scale, self._by_operator(shares), whole, total)

    def _long(self, end: int, main: np.ndarray, total: int) -> tuple[dict[int, float], float, float]:
        """The block takes at least as long as its computation and what it waits for; with the lower end also for
        gathered parameters."""
        terms = {int(i): -1e3 * main[i] for i in np.flatnonzero(main)}
        if end == 1:
            for (hidden, _), sent in self._beside.items():
                if hidden == "parameter":
                    for variable, seconds in sent.items():
                        terms[variable] = terms.get(variable, 0.0) - 1e3 * seconds[end]
        return {**terms, total: 1.0}, 0.0, np.inf

    def _links_busy(self, end: int, dims: tuple[int, ...], total: int) -> tuple[dict[int, float], float, float]:
        """... and as long as the links along these dims are busy with what runs beside computation."""
        terms: dict[int, float] = {}
        for hidden in ("parameter", "gradient"):
            for variable, seconds in self._beside.get((hidden, dims), {}).items():
                terms[variable] = -1e3 * seconds[end]
        return {**terms, total: 1.0}, 0.0, np.inf

    def _by_operator(self, shares: np.ndarray) -> dict[str, float]:
        """Seconds by name, the mean of both ends, hidden or not."""
        chosen: dict[str, float] = {}
        beside = {v: s for sent in self._beside.values() for v, s in sent.items()}
        for variable, name in self._names.items():
            seconds = beside.get(variable) or self._costs[variable]
            if shares[variable] > 1e-9 and sum(seconds) > 0:
                chosen[name] = chosen.get(name, 0.0) + float(shares[variable]) * sum(seconds) / 2
        return chosen
