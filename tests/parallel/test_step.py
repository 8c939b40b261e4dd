"""The training step: the only one, its moments, and what it returns."""

import ast
from pathlib import Path

import pytest

import plait
from plait.testing import Trial, share, train
from plait_testing.pool import RankError

ROOT = Path(plait.__file__).parents[2]
PLAN = "plugins/plan/src/plait_plan/tracing/step.py"  # makes an optimizer's states, with no step
FOREIGN = "plugins/testing/src/plait_testing/foreign/runs.py"  # steps what `plait verify FILE.py::function` is given
TAKES_A_STEP = {"core/plait/parallel/applied.py", PLAN, FOREIGN}
REHEARSES = {  # on tensors of no model
    f"core/plait/{name}.py" for name in ("train/rehearsal", "parallel/state", "train/optimizer_trials")
}


def steps_in(path):
    """The calls of `step` without arguments on something that is called an optimizer, or was made one."""
    return [
        ast.unparse(call)
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "step"
        and not call.args
        and not call.keywords
        and "profile" not in ast.unparse(call.func.value)
    ]


def test_nothing_else_steps_an_optimizer():
    found = {}
    for path in (*ROOT.glob("core/plait/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")):
        named = [call for call in steps_in(path) if not call.startswith(("made.", "recorded."))]  # a plan's whole step
        if named:
            found[str(path.relative_to(ROOT))] = len(named)
    assert found.keys() == TAKES_A_STEP | REHEARSES
    assert all(found[path] == 1 for path in TAKES_A_STEP)


class Moments(plait.Observer):
    def __init__(self):
        self.seen = []

    def __getattribute__(self, name):
        if name.startswith("_") or name == "seen":
            return super().__getattribute__(name)
        return lambda *arguments: self.seen.append((name, *(a for a in arguments if isinstance(a, int))))


def moments(strategies, micro):
    """The moments of the second step, and whether its loss, norm and count are those of the trial."""
    trial = Trial(micro=micro)
    applied = trial.apply(strategies)
    optimizer = trial.optimizer(applied.parameters())
    watch = Moments()
    for step in range(2):
        watch.seen.clear()
        batch, total = share(applied, trial, step)
        rows = len(batch.tokens) // micro
        done = applied.step(batch, optimizer, observer=watch, rows=rows, max_norm=trial.max_norm)
        assert done.tokens == total  # counted by the step itself
    return watch.seen, float(done.norm), applied.steps


@pytest.mark.parametrize(("strategies", "world"), [({}, 1), ({"fsdp2": {}}, 2)])
def test_each_moment_comes_once_and_in_order(plait_ranks, strategies, world):
    (expected,) = plait_ranks.run(train, Trial(micro=2), world=1)
    wanted = [("start", 2), ("count",)]
    for micro in (0, 1):
        wanted += [("forward", micro), ("loss", micro), ("backward", micro)]
    wanted += [("clip",), ("optimizer",), ("balance",), ("after",)]
    for seen, norm, steps in plait_ranks.run(moments, strategies, 2, world=world):
        assert seen == wanted
        assert norm == pytest.approx(expected.norms[1], rel=1e-12)
        assert steps == 2


def cut_short():
    """A step whose observer raises leaves the parameters alone."""
    trial = Trial()
    applied = trial.apply({})
    optimizer = trial.optimizer(applied.parameters())
    before = [p.clone() for p in applied.parameters()]

    class Stops(plait.Observer):
        def clip(self):
            raise RuntimeError("enough")

    try:
        applied.step(share(applied, trial, 0)[0], optimizer, observer=Stops())
    except RuntimeError:
        assert all(p.equal(b) for p, b in zip(applied.parameters(), before, strict=True))
        raise


def test_what_an_observer_raises_ends_the_step(plait_ranks):
    with pytest.raises(RankError, match="enough"):
        plait_ranks.run(cut_short, world=1)


def test_several_observers_are_one():
    from plait.contract.observer import Together

    first, second = Moments(), Moments()
    both = Together([first])
    both.start(1)
    both.all.append(second)
    both.forward(3)
    both.row({})
    assert first.seen == [("start", 1), ("forward", 3), ("row",)]
    assert second.seen == [("forward", 3), ("row",)]
