"""Does it combine with others, and is it named when it fails?"""

from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from plait import MeshAxis, PlaitError, hookimpl
from plait.host import plugins
from plait_testing.grade import REFUSED
from plait_testing.models import MODELS
from plait_testing.parity import BOUNDS, apart, mean_gradients, unequal, wrong_gradients
from plait_testing.pool import Pool, RankError
from plait_testing.strategies import FURTHEST, extending, is_own
from plait_testing.suite.capabilities import Layout
from plait_testing.suite.nearness import Nearness
from plait_testing.trial import Trial, TrialResult, train


def trial_options(name: str) -> Mapping[str, Any]:
    """The options with which a strategy takes part in others' tests: its class's `trial`, if it has one."""
    return getattr(plugins.load(name), "trial", {})


class Combination(Nearness):
    def test_composes_with(self, plait_ranks: Pool, other: str | None) -> None:
        """On 4 ranks with another strategy: still what one process computes, under those of them whose numerics are
        their own too unless these add axes; or one of the two refuses with a message."""
        if other is None:
            pytest.skip("no other strategy is installed")
        try:
            pair = {self.strategy: trial_options(self.strategy), other: trial_options(other)}
            plugins.hooks(other, plugins.create(other, pair[other]))
        except PlaitError as error:
            pytest.skip(f"{other} is broken by itself: {error}")
        try:
            trial, degree = self._fitting(Layout(4, pair[self.strategy], {other: pair[other]}))
        except PlaitError as error:
            if any(repr(name) in str(error) for name in pair):
                pytest.skip(f"{REFUSED}{error}")
            pytest.skip(f"their axes do not fit 4 ranks together, so set `trial` on one of the classes: {error}")
        results = plait_ranks.once(train, trial, pair, world=4)
        expected = plait_ranks.once(train, trial, extending(pair), world=1)[0]
        own, spec = {name: its for name, its in pair.items() if is_own(name)}, self.extended(trial, pair)[1]
        near = wrong_gradients(mean_gradients(results), expected, FURTHEST, spec) if own else None
        assert near is None, f"averaged over the ranks of {degree}, {near}"
        owners = self._assembly(Layout(4, pair[self.strategy], {other: pair[other]}), trial).layout.owner
        exact = own.keys().isdisjoint(owners.values())  # one process computes what strategies without axes do
        if own and exact:
            expected = plait_ranks.once(train, trial, {**extending(pair), **own}, world=1)[0]
        for rank, result in enumerate(results):
            where = f"rank {rank} of {degree}"
            assert (wrong := unequal(result.initial, expected.initial)) is None, f"{where}, initial: {wrong}"
            if exact:
                wrong = wrong_gradients(result, expected, BOUNDS["float64"][0], spec)
                assert wrong is None, f"{where}: {wrong}"
                off, step = apart(result.losses, expected.losses)
                assert off <= BOUNDS["float64"][1], f"{where}: the loss of step {step} is off by {off:.2e}"

    def _fitting(self, layout: Layout) -> tuple[Trial, dict[str, int]]:
        """A trial of the first model that all strategies of a layout train, and the layout's degrees."""
        refused: PlaitError | None = None
        for model in MODELS:
            try:
                if f"model {model}" not in self.refuses:
                    return self.trial(model), self.degrees(layout, Trial(model))
            except PlaitError as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def test_keeps_to_the_ranks_of_its_own_axes(self, plait_ranks: Pool) -> None:
        """Beside a strategy whose ranks see the same tokens and hold the same values: sums over all ranks would be
        wrong."""
        chosen, trial = self.layouts[self.last], self.trying()
        if 2 * chosen.world > plait_ranks.size:
            pytest.skip(f"its last layout, twice, needs more than {plait_ranks.size} ranks")
        expected = self.expected(plait_ranks, self.last, trial)
        echoed = plait_ranks.run(_beside_echo, trial, self.selected(chosen), world=2 * chosen.world)
        if self.own:
            self.check_near(echoed, self.of_one_process(plait_ranks, self.last, trial), trial)
        for rank, result in enumerate(echoed):
            own = expected[rank // 2]  # the echo is the innermost axis
            wrong = wrong_gradients(result, own, BOUNDS["float64"][0], self.extended(trial)[1])
            assert wrong is None, f"rank {rank}, whose neighbour sees the same tokens: {wrong}"
            off, step = apart(result.norms, own.norms)
            assert off <= BOUNDS["float64"][1], f"rank {rank}: the norm of step {step} is off by {off:.2e}"

    def test_an_error_in_a_hook_names_it(self, plait_ranks: Pool, hook: str) -> None:
        chosen = self.layouts[self.last]
        with pytest.raises(RankError) as caught:
            plait_ranks.run(_failing, self.strategy, hook, self.trying(), self.selected(chosen), world=chosen.world)
        assert f"raised by {plugins.described(self.strategy)} in its hook {hook!r}" in str(caught.value)


@attrs.define
class Echo:
    """Two ranks that do the same: an axis that splits nothing."""

    name = "echo"

    @hookimpl
    def build_mesh(self) -> list[MeshAxis]:
        return [MeshAxis("echo", 2)]


def _beside_echo(trial: Trial, strategies: Mapping[str, Any]) -> TrialResult:
    return train(trial, strategies, [Echo()])


def _failing(name: str, hook: str, trial: Trial, strategies: Mapping[str, Any]) -> None:
    """A search, a plan's question, set-up and a step in which `hook` of the strategy raises."""
    from unittest import mock

    from plait_testing.trial import take_step

    cls = plugins.load(name)

    def fails(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("planted")

    original = getattr(cls, hook)
    options = original.plait_impl
    marked = hookimpl(**{k: v for k, v in options.items() if k != "specname"})(_like(original, fails))
    with mock.patch.object(cls, hook, marked):
        applied = trial.apply(strategies)
        applied.hooks.answers("choices", run=applied.run, world_size=applied.run.world_size)  # what a search asks
        if hook == "plan_stages":  # what a plan asks of the undivided model
            applied.hooks.first(hook, model=trial.build(), spec=applied.spec, run=applied.run, micro=1)
        optimizer = applied.optimizer(trial.optimizer)
        take_step(applied, optimizer, trial, 0)
        applied.export(applied.checkpoint(optimizer)[0])


def _like(original: Any, fails: Any) -> Any:
    """A function with the arguments of `original`, because hooks are called by argument names."""
    import inspect

    names = list(inspect.signature(original).parameters)
    source = f"def hook({', '.join(names)}):\n    fails()" + "\n    yield" * inspect.isgeneratorfunction(original)
    scope: dict[str, Any] = {"fails": fails}
    exec(source, scope)
    return scope["hook"]
