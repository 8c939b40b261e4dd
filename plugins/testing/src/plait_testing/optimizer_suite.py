"""The conformance suite of an optimizer: in every layout the steps of one process, and a resumed run goes on alike."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import Tensor

from plait import Applied, PlaitError
from plait.host import Saver, Store, load
from plait_testing.grade import REFUSED
from plait_testing.parity import unequal
from plait_testing.pool import Pool
from plait_testing.strategies import extending, is_own, others
from plait_testing.suite.capabilities import Layout
from plait_testing.suite.composition import trial_options
from plait_testing.suite.loadable import everything
from plait_testing.suite.state import step
from plait_testing.trial import Trial, held

BOUND = 1e-10  # of the way that a parameter went, in float64
STEPS, SAVED = 4, 2  # steps of a run, and after how many of them it is saved


@attrs.frozen
class Trained:
    """What came of a run on one rank: the sentence that refused it, or parameters by FQN, how far a resumed run differs
    from one that went on, and the checkpoint from which it was resumed."""

    refusal: str | None = None
    initial: Mapping[str, Tensor] = attrs.Factory(dict)
    final: Mapping[str, Tensor] = attrs.Factory(dict)
    resumed: str | None = None
    saved: Path | None = None


class OptimizerSuite:
    """Set these on a subclass.

    optimizer:   as in `conf/optimizer`: `{"_target_": "my_optimizers.Mine", "lr": 0.01}`. Ranks import it by that name.
    elementwise: whether a step of an element needs no other element, so that no layout may refuse it. False: one that
                 divides matrices may, in one sentence. One that gathers them is True: it works in every layout.
    model:       one of `plait_testing.models`.
    layouts:     name -> `Layout(world, beside={strategy: options})`. Default: every installed strategy that is exact,
                 on two ranks.
    """

    optimizer: ClassVar[Mapping[str, Any]]
    elementwise: ClassVar[bool] = True
    model: ClassVar[str] = "llama3"
    layouts: ClassVar[Mapping[str, Layout]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "layout" in metafunc.fixturenames:
            metafunc.parametrize("layout", list(self._layouts()) or [None])

    def test_one_process_takes_it(self, plait_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> None:
        """It makes steps, follows the schedule, and keeps all that it keeps in `state`; a resumed run goes on bitwise
        as one that was not interrupted."""
        one = self._one_process(plait_ranks, tmp_path_factory)
        still = [name for name, start in one.initial.items() if torch.equal(start, one.final[name])]
        assert not still, f"{STEPS} steps leave {len(still)} parameters as they were: {', '.join(still[:5])}"
        assert one.resumed is None, f"a resumed run differs in one process: {one.resumed}"

    def test_steps_equal_one_process(
        self, plait_ranks: Pool, layout: str, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """In float64, for each parameter: off by at most 1e-10 of the way that it went."""
        one = self._one_process(plait_ranks, tmp_path_factory)
        for rank, run in enumerate(self._runs(plait_ranks, layout, tmp_path_factory)):
            wrong = unequal(dict(run.initial), dict(one.initial))
            assert wrong is None, f"rank {rank}, initial parameters: {wrong}"
            _check(run.final, one, f"rank {rank}", "does it take a shard for the whole parameter?")

    def test_a_resumed_run_goes_on_bitwise(
        self, plait_ranks: Pool, layout: str, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """Parameters and the optimizer's state, after steps that follow a checkpoint."""
        for rank, run in enumerate(self._runs(plait_ranks, layout, tmp_path_factory)):
            assert run.resumed is None, f"rank {rank}: {run.resumed}"

    def test_a_run_goes_on_in_another_layout(
        self, plait_ranks: Pool, layout: str, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """What one process saved is loaded in this layout, and what this layout saved in one process: both end where
        one process does, within the same bound."""
        one = self._one_process(plait_ranks, tmp_path_factory)
        run, here = self._runs(plait_ranks, layout, tmp_path_factory)[0], self._layouts()[layout]
        hint = "does its state depend on how many ranks there are?"
        for beside, world, saved, way in (
            (dict(here.beside), here.world, one.saved, f"from one process to {layout}"),
            ({}, 1, run.saved, f"from {layout} to one process"),
        ):
            for rank, final in enumerate(plait_ranks.run(_resumed, self._trial(), beside, saved, world=world)):
                _check(final, one, f"rank {rank}, resumed {way}", hint)

    def _trial(self) -> Trial:
        return Trial(self.model, steps=STEPS, trains_with=dict(self.optimizer))

    def _layouts(self) -> dict[str, Layout]:
        if self.layouts:
            return dict(self.layouts)
        exact = [name for name in others() if not extending({name: {}}) and not is_own(name)]
        return {name: Layout(2, beside={name: trial_options(name)}) for name in exact}

    def _one_process(self, ranks: Pool, folders: pytest.TempPathFactory) -> Trained:
        (one,) = self._run(ranks, Layout(1), folders)
        assert one.refusal is None, f"one process refuses it: {one.refusal}"
        return one

    def _runs(self, ranks: Pool, layout: str | None, folders: pytest.TempPathFactory) -> list[Trained]:
        """The run of every rank. Skips if the strategy or, of one that is not element-wise, the core refuses."""
        if layout is None:
            pytest.skip("no strategy is installed")
        runs = self._run(ranks, self._layouts()[layout], folders)
        refusal = runs[0].refusal
        if refusal is not None:
            of_optimizer = refusal.startswith("optimizer")
            assert not (of_optimizer and self.elementwise), f"it is element-wise, but under {layout} {refusal}"
            pytest.skip(f"{REFUSED}{refusal}")
        return runs

    def _run(self, ranks: Pool, layout: Layout, folders: pytest.TempPathFactory) -> list[Trained]:
        trial = self._trial()
        key = repr(("optimizer", trial, layout))
        if key not in ranks.kept:
            folder = folders.mktemp("optimizer")
            ranks.kept[key] = ranks.run(_trained, trial, dict(layout.beside), folder, world=layout.world)
        return ranks.kept[key]


def _check(final: Mapping[str, Tensor], one: Trained, where: str, hint: str) -> None:
    """That each parameter ended where one process left it."""
    for name, end in one.final.items():
        off, way = float((final[name] - end).norm()), float((end - one.initial[name]).norm())
        assert off <= BOUND * way, (
            f"{where}: {name!r} went elsewhere than in one process, off by {off / max(way, 1e-300):.1e} of its way "
            f"(bound {BOUND:.0e}): {hint}"
        )


def _trained(trial: Trial, strategies: Mapping[str, Any], folder: Path) -> Trained:
    try:
        return _saved_and_resumed(trial, strategies, folder)
    except PlaitError as error:
        return Trained(str(error))


def _saved_and_resumed(trial: Trial, strategies: Mapping[str, Any], folder: Path) -> Trained:
    """A run that is saved on its way, and one that starts from there."""
    applied = trial.apply(strategies)
    initial, optimizer = held(applied), applied.optimizer(trial.optimizer)
    for number in range(SAVED):
        step(applied, optimizer, trial, number)
    saver = Saver(Store(folder), "sync")
    saver.save(applied.checkpoint(optimizer)[0], SAVED)
    saver.wait()
    for number in range(SAVED, STEPS):
        step(applied, optimizer, trial, number)
    final, went_on, saved = held(applied), everything(applied, optimizer), Store(folder).latest()
    return Trained(None, initial, final, unequal(everything(*_gone_on(trial, strategies, saved)), went_on), saved)


def _resumed(trial: Trial, strategies: Mapping[str, Any], saved: Path) -> dict[str, Tensor]:
    """The parameters at the end of a run that starts from the checkpoint `saved`, by FQN."""
    return held(_gone_on(trial, strategies, saved)[0])


def _gone_on(trial: Trial, strategies: Mapping[str, Any], saved: Path | None) -> tuple[Applied, torch.optim.Optimizer]:
    assert saved is not None
    other = attrs.evolve(trial, seed=1)
    applied = other.apply(strategies)
    optimizer = applied.optimizer(other.optimizer)
    load(saved, *applied.checkpoint(optimizer))
    for number in range(SAVED, STEPS):
        step(applied, optimizer, other, number)
    return applied, optimizer
