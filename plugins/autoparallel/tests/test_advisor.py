"""The advisor: its program against every assignment, and whole advice on tiny models."""

import itertools
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from plait import Cluster, PlaitError, planning
from plait.host import check, compose
from plait.parallel.assembly import assemble
from plait_autoparallel.advisor import advise, program, report, strategies
from plait_autoparallel.advisor.block import BlockProblem
from plait_autoparallel.advisor.links import Links, MeshDim
from plait_autoparallel.advisor.program import Problem, ProblemStep, Program, Way
from plait_autoparallel.solve import Segment

SIZE = 2**20  # of the MLP's tensors: rows and columns
CPU: Any = Cluster.of(compose(["strategy=[]", "cluster=cpu"]).cluster)


def links(degrees=(2,)):
    dims, stride = [], 1
    for i, degree in reversed(list(enumerate(degrees))):
        dims.insert(0, MeshDim(f"d{i}", degree, stride))
        stride *= degree
    return Links(tuple(dims), CPU)


def product(name, used, made, seconds):
    """Of matrices on one mesh dim, as DTensor divides it."""
    half = (seconds[0] / 2, seconds[1] / 2)
    ways = [("R", "R", "R", seconds), (0, "R", 0, half), ("R", 1, 1, half), (1, 0, "P", half)]
    return ProblemStep(name, used, (made,), tuple(Way(((a,), (b,)), ((c,),), cost) for a, b, c, cost in ways))


def mlp(speed, weights):
    """Two layers, x (0) with the weights 1 and 2 to 4; the result lies as x does."""
    shapes = dict.fromkeys(range(5), ((1024, 1024), SIZE * 4))
    steps = [product("first", (0, 1), 3, speed), product("second", (3, 2), 4, speed)]
    return Problem(links(), steps, shapes, {1: weights[:1], 2: weights[1:]}, {}, [(0, 4)], {})


def moved(net, start, end):
    """Seconds of the cheapest way from one placement to another, by trying all moves."""
    cheapest = {(start,): 0.0}
    for _ in range(3):
        for before, cost in list(cheapest.items()):
            for move in net.moves((1024, 1024), SIZE * 4, before):
                more = sum(move.seconds) / 2 + move.latency if move.kind else 0.0
                cheapest[move.after] = min(cheapest.get(move.after, 1e9), cost + more)
    return cheapest[(end,)]


def brute_force(problem):
    net, best = problem.links, 1e9
    first, second = problem.steps
    for a, b, x in itertools.product(first.choices, second.choices, ["R", "P", 0, 1]):
        cost = sum(a.seconds) / 2 + sum(b.seconds) / 2
        cost += moved(net, x, a.inputs[0][0]) + moved(net, problem.stored[1][0], a.inputs[1][0])
        cost += moved(net, a.results[0][0], b.inputs[0][0]) + moved(net, problem.stored[2][0], b.inputs[1][0])
        cost += moved(net, b.results[0][0], x)
        best = min(best, cost)
    return best


@pytest.mark.parametrize("speed", [(1e-5, 2e-5), (1e-3, 2e-3), (1e-1, 2e-1)])
@pytest.mark.parametrize("weights", list(itertools.product(["R", 0, 1], repeat=2)))
def test_the_bound_of_a_two_layer_mlp_is_the_best_of_all_assignments(speed, weights):
    problem = mlp(speed, weights)
    found = Program(problem).solve()
    expected = brute_force(problem)
    assert found.whole
    assert found.seconds == pytest.approx(expected, rel=1e-6)


def test_a_worse_plan_shows_a_gap():
    whole = Program(mlp((1e-1, 2e-1), ("R", "R")))
    least = whole.solve()
    worse = whole.solve(lambda i, choice: choice.results[0] == ("R",))
    assert worse.seconds == pytest.approx(2 * least.seconds)
    assert whole.solve(lambda i, choice: False) is None


def test_a_program_that_takes_too_long_says_how_large_it_is(monkeypatch):
    monkeypatch.setattr(program, "LIMIT", 0.0)
    with pytest.raises(program.Unsolved, match=r"no bound within 0\.0 s; the program has \d+ variables"):
        Program(mlp((1e-1, 2e-1), ("R", "R"))).solve()


def test_an_unknown_operator_costs_nothing_and_fits_anything():
    problem = mlp((1e-1, 2e-1), ("R", "R"))
    without = attrs.evolve(problem, steps=[problem.steps[0], attrs.evolve(problem.steps[1], choices=None)])
    assert Program(without).solve().seconds == pytest.approx(Program(problem).solve().seconds / 2)


def test_a_move_serves_all_users():
    """A sum that two operators need in full is summed once."""
    both = Way((("R",),), ((0,),), (0.0, 0.0))
    made = ProblemStep("made", (), (0,), (Way((), (("P",),), (0.0, 0.0)),))
    users = [ProblemStep(f"user {i}", (0,), (i,), (both,)) for i in (1, 2)]
    values = dict.fromkeys(range(3), ((1024, 1024), SIZE * 4))
    found = Program(Problem(links(), [made, *users], values, {}, {}, [], {})).solve()
    assert found.seconds == pytest.approx(moved(links(), "P", "R"))


def test_a_gradient_is_cast_before_it_is_summed():
    """To sum first and cast a part of the result would be cheaper, but is not the sum that was asked for."""
    made = ProblemStep("made", (), (0,), (Way((), (("P",),), (0.0, 0.0)),))
    ways = [Way(((w,),), ((w,),), (t, t)) for w, t in (("P", 1.0), (0, 0.5), ("R", 1.0))]
    cast = ProblemStep("cast", (0,), (1,), tuple(ways))
    values = {0: ((1024, 1024), SIZE * 2), 1: ((1024, 1024), SIZE * 4)}
    problem = Problem(links(), [made, cast], values, {}, {1: (0,)}, [], {0: "gradient", 1: "gradient"})
    assert Program(problem).solve().operators["cast"] == pytest.approx(0.5)
    asked = attrs.evolve(problem, unsummed=frozenset({0}))
    assert Program(asked).solve().operators["cast"] == pytest.approx(1.0)


def test_two_dims_move_together_or_one_after_the_other():
    net = links((2, 4))
    over = {move.dims for move in net.moves((64, 64), 64 * 64 * 4, (0, 0))}
    assert over == {(0,), (1,), (0, 1)}
    assert net.members((0, 1)) == tuple(range(8))
    assert net.members((1,)) == (0, 1, 2, 3)
    assert not net.fits((4, 64), (0, 0))


TINY = [
    "strategy=[autoparallel]", "cluster=cpu", "model.dim=32", "model.n_layers=2", "model.n_heads=4",
    "model.n_kv_heads=2", "model.ffn_dim=64", "train.seq_len=64", "train.local_batch_size=2", "launch.device=cpu",
    "strategy.autoparallel.advisor=true",
]  # fmt: skip


BF16 = ["precision.param=bfloat16"]
CONFIG = compose([*TINY[1:-1], *BF16, "strategy=[fsdp2]", "model.n_layers=1"])


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(2, ["strategy.autoparallel.strategies=[fsdp2]", *BF16], marks=pytest.mark.slow),
        pytest.param(
            4,
            ["strategy.autoparallel.strategies=[fsdp2,tensor_parallel]", "strategy.autoparallel.axes={tp: 2}"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_plan_of_a_tiny_model_is_feasible_and_not_below_its_bound(world, options):
    run = check(compose([*TINY, *options]), world).assembly.run
    (block,) = run.reports["advisor"]["blocks"]
    assert block["count"] == 2
    assert block["unknown"] == {}
    assert 0 < block["bound"] <= block["program"] * (1 + 1e-6)
    assert block["program"] <= block["planned"] * (1 + 1e-6)
    assert block["matched"][0] > 0.8 * block["matched"][1]
    (_, said), *_ = run.said
    assert "the operators with the largest differences" in said


@pytest.fixture(scope="module")
def traced():
    """A block of a tiny model on one rank, the same under FSDP2 on two, and their layout."""
    layout = assemble(CONFIG, 2, device_type="cpu").layout
    (whole,), (local,) = (
        planning.block_graphs(CONFIG, chosen, ranks, rows, {})
        for chosen, ranks, rows in (({}, 1, 4), ({"fsdp2": {"shard": 2}}, 2, 2))
    )
    return whole, local, layout


@pytest.mark.slow
def test_recomputation_gathers_no_parameter_twice():
    """A strategy may keep what it has gathered and cast, so a bound must not pay for it a second time."""
    gathered = {}
    for mode in ("none", "full"):
        (graph,) = planning.block_graphs(CONFIG, {}, 1, 4, {0: mode})
        with strategies.enumerations([2]) as asked:
            moved = BlockProblem(graph, links(), {}, asked, 4).problem.moved
        gathered[mode] = list(moved.values()).count("parameter")
    assert gathered["full"] == gathered["none"]


def sharded(whole):
    """Where FSDP2 puts the parameters of a block."""
    shapes = {name: whole.values[v].shape for name, v in whole.parameters.items()}
    return {
        f"{whole.block}.{name}": Lying(shape, (("dp_shard",), *((),) * (len(shape) - 1)))
        for name, shape in shapes.items()
    }


def bounded(traced, planned):
    whole, local, layout = traced
    net = Links(tuple(advise.cut(layout, CPU)), CPU)
    return advise._bounded(whole, local, net, layout, sharded(whole), [whole.block], "none", planned, 4)


@pytest.fixture(scope="module")
def found(traced):
    return bounded(traced, 1.0)


@attrs.frozen
class Lying:
    shape: tuple[int, ...]
    divided: tuple[tuple[str, ...], ...]


@pytest.mark.slow
def test_an_operator_that_dtensor_does_not_know_is_named(traced, found, monkeypatch):
    assert found.unknown == {}
    assert found.bound <= found.program * (1 + 1e-12) < 1.0  # both are sums, in another order
    monkeypatch.setattr(strategies, "_APART", {})
    without = bounded(traced, 1.0)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in without.unknown
    assert without.bound < found.bound
    said = report.page([without], 1, 2.0)
    assert "unknown to DTensor, counted as 0: aten::_scaled_dot_product_flash_attention_for_cpu" in said


def test_a_bound_is_of_the_samples_of_all_data_ranks(traced, found):
    """`found` is of four samples, beside two ranks that have two each."""
    whole, _, layout = traced
    candidate = SimpleNamespace(composition=SimpleNamespace(layout=layout), rows=2)
    price = SimpleNamespace(blocks=[{"none": SimpleNamespace(seconds=1.0)}])
    best = SimpleNamespace(candidate=candidate, price=price, mix=SimpleNamespace(modes=("none",)))
    segments = [Segment((whole.block,), 0, ("none",))]
    plan = SimpleNamespace(best=best, segments=segments, pieces=[SimpleNamespace(tensors=sharded(whole))])
    (one,) = advise.advise(CONFIG, {"fsdp2": {"shard": 2}}, plan, CPU)
    assert (one.bound, one.program) == pytest.approx((found.bound, found.program))
    assert one.matched == found.matched


def test_a_frozen_parameter_has_no_gradient_to_sum(traced, found):
    whole, *others = traced
    name, gradient = next(iter(whole.gradients.items()))
    gradients = {n: v for n, v in whole.gradients.items() if n != name}
    frozen = attrs.evolve(whole, gradients=gradients, used_outside=whole.used_outside - {gradient})
    assert name in frozen.parameters
    assert 0 < bounded((frozen, *others), 1.0).bound < found.bound


def test_no_strategy_of_an_operator_divides_a_tensor_unevenly(traced):
    """Queries have four heads, and keys and values two."""
    whole, *_ = traced
    forward, backward = (node for node in whole.nodes if "attention" in node.call.name)
    with strategies.enumerations([4]) as (asked,):
        for node in (forward, backward):
            values = [whole.values[v] for v in (*node.used(), *node.made)]
            found = asked.strategies(node, whole.values)
            assert len(found) > 1
            for inputs, results in found:
                divided = [(v.shape, way) for v, way in zip(values, (*inputs, *results), strict=True) if way != "R"]
                assert all(shape[way] % 4 == 0 for shape, way in divided), node.call.name


def test_operators_whose_times_differ_most_come_first():
    plan = {"alike": 4.0, "first": 1.0, "less": 2.0, "more": 9.0, "most": 20.0, "some": 3.0}
    bound = {"alike": 4.0, "first": 1.5, "less": 1.0, "more": 1.0, "hidden": 5.0, "some": 1.0}
    found = advise._differences(plan, bound)
    assert list(found.items()) == [
        ("most", (20.0, 0.0)),
        ("more", (9.0, 1.0)),
        ("hidden", (0.0, 5.0)),
        ("some", (3.0, 1.0)),
        ("less", (2.0, 1.0)),
    ]


def test_a_plan_faster_than_its_bound_is_an_error(traced):
    with pytest.raises(PlaitError, match=r"the plan takes 1e-09 s .* less than its lower bound of"):
        bounded(traced, 1e-9)


def test_an_axis_is_cut_where_a_node_ends():
    config = compose([*TINY[1:-1], "strategy=[fsdp2]"])
    layout = assemble(config, 12, device_type="cpu").layout
    cluster = attrs.evolve(CPU, node=4)
    assert [(d.axis, d.size, d.stride) for d in advise.cut(layout, cluster)] == [("dp_shard", 3, 4), ("dp_shard", 4, 1)]
