"""What an author declares about a strategy, and how the suite's tests get their results."""

import functools
import inspect
import math
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

import attrs
import cloudpickle
import pytest
from torch import Tensor, nn

from plait import Config
from plait.host import assembled, plugins
from plait_testing import whole_run
from plait_testing.count import Collective
from plait_testing.grade import REFUSED
from plait_testing.models import MODELS, OF_FOUR
from plait_testing.pool import Pool, RankError
from plait_testing.strategies import declared_distance, distance, extending, is_own, others
from plait_testing.trial import Trial, TrialResult, made, train

REFUSABLE = ("accumulation", "remat=full", "remat=selective", "compile", "mixed precision", "float32", "loss.chunks")

# What a quick run leaves out: several starts of `plait train`, layouts into layouts, compilers, and what a strategy can
# hardly change.
SLOW = (
    *("test_killed_and_resumed", "test_checkpoint_loads_in", "test_compiled", "test_the_compiled_loss"),
    *("test_packed_documents", "test_two_runs", "test_recomputation_changes_nothing[selective]"),
)
SINGLE_STEPS = 5  # in float32: of the run that one process and a second run must equal


@attrs.frozen
class Layout:
    """One way to run the strategy.

    world: the number of ranks, 1 to 4.
    options: its own.
    beside: name -> options of other strategies that take part.
    """

    world: int
    options: Mapping[str, Any] = attrs.Factory(dict)
    beside: Mapping[str, Mapping[str, Any]] = attrs.Factory(dict)


class Capabilities:
    """Set these on a subclass.

    strategy: the name of its entry point.
    axes:     names of the mesh axes and views that it adds.
    layouts:  name -> `Layout`; each must equal one process. Features are tested in the last.
    refuses:  what it refuses -> a regular expression for its message: "accumulation", "remat=full",
              "remat=selective", "compile", "mixed precision", "float32", "loss.chunks", or "model <name>" for
              one of `plait_testing.models`.
    optimizer: with which trials train, as in `conf/optimizer`: `{"_target_": "torch.optim.SGD", "lr": 0.1}`. Default:
              AdamW. Whole runs have that of `run_model`, memory is measured with AdamW.
    run_model: the model of whole runs, as written after `plait train`. Default: a small llama3_debug.
    once_a_step: kinds of collectives, such as "all_reduce", that a step has no more of if it has several micro-batches,
              because only the last sums gradients over ranks. Of the others it may have as many for each.
    slow:     beginnings of the names of tests that `-m 'not slow'` leaves out, besides those of other layouts than the
              last: they take long, and other tests make the same claim.
    quick:    beginnings of the names of tests that it runs although `slow` has them.
    """

    strategy: ClassVar[str]
    axes: ClassVar[tuple[str, ...]] = ()
    layouts: ClassVar[Mapping[str, Layout]]
    refuses: ClassVar[Mapping[str, str]] = {}
    optimizer: ClassVar[Mapping[str, Any] | None] = None
    run_model: ClassVar[tuple[str, ...]] = whole_run.MODEL
    once_a_step: ClassVar[tuple[str, ...]] = ()
    slow: ClassVar[tuple[str, ...]] = SLOW
    quick: ClassVar[tuple[str, ...]] = ()

    # Like hooks, these two take those of their arguments that they name; any signature is one of theirs.

    def held(self, *_: Any, **given: Any) -> int:
        """`held(shape, axes, degree, options)`: how many elements of a parameter a rank holds at most. Default: all,
        nothing is sharded.

        shape, axes: of the whole parameter, with its logical axes. degree: mesh axis -> number of its ranks. options:
        all of the strategy's in this layout, with their defaults.
        """
        return math.prod(given["shape"])

    def held_gradient(self, *_: Any, **given: Any) -> int:
        """The same of its gradient. Default: as many elements as of the parameter."""
        return given["held"]

    def held_state(self, *_: Any, **given: Any) -> int:
        """The same of each moment of AdamW. Default: as many elements as of the parameter."""
        return given["held"]

    def collectives(self, *_: Any, **given: Any) -> list[Collective] | None:
        """`collectives(size, degree, options)`: the collectives of one step on one rank: forward and backward of one
        batch, without loss and norm.

        An expression in the sizes of the model (`count.Size`), the degrees of the mesh and the options of the layout;
        it is checked at two sizes and two degrees. Default: not declared, which counts as skipped.
        """
        return None

    def collectives_of_update(self, *_: Any, **given: Any) -> list[Collective]:
        """The collectives of one step of AdamW on one rank, with what a strategy does around it. Default: none."""
        return []

    def reference(self, layout: Layout, trial: Trial) -> "TrialResult | list[TrialResult]":
        """What the ranks of `layout` must equal, computed by one process: a result, or one per rank.

        Default: the model trained by one process, under no strategy other than those that extend it; and, of
        `numerics = "own"` without mesh axes, under the strategy itself. Override it for `numerics = "own"` with axes.
        """
        selected = self.selected(layout)
        alone = {self.strategy: layout.options} if self.own and not self.axes else {}
        return train(trial, {n: its for n, its in selected.items() if n in extending(selected) or n in alone})

    # How tests get their parameters and results.

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        values: dict[str, list[Any]] = {
            "layout": list(self.layouts),
            "model": list(MODELS),
            "world": [1, 2, 3, 4],
            "other": others(self.strategy) or [None],
            "mode": ["full", "selective"],
            "hook": self._hooks() if "hook" in metafunc.fixturenames else [],
        }
        for name in values:
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values[name])

    def trying(self, **changes: Any) -> Trial:
        """A trial of the first model that the strategy does not refuse, with the gradients of its last step."""
        return self.trial(self._allowed(*MODELS), **{"last": True, **changes})

    def trial(self, model: str, **changes: Any) -> Trial:
        """One of this model, with the optimizer that the class declares."""
        return Trial(model, **{"trains_with": self.optimizer, **changes})

    def trying_tied(self, **changes: Any) -> Trial:
        """A trial of a model with tied parameters, if the strategy trains one."""
        return self.trial(self._allowed("tied", "odd", *MODELS), **changes)

    def trying_four(self, **changes: Any) -> Trial:
        """A trial of that model with four blocks, if there is one."""
        model = self._allowed(*MODELS)
        return Trial(OF_FOUR.get(model, model), **{"trains_with": self.optimizer, **changes})

    def _allowed(self, *models: str) -> str:
        return next(name for name in models if f"model {name}" not in self.refuses)

    def declared(self, what: str, layout: Layout, **given: Any) -> Any:
        """What the method `what` declares of a layout."""
        options = attrs.asdict(plugins.create(self.strategy, layout.options), recurse=False)
        method, given = getattr(self, what), {"options": options, **given}
        names = inspect.signature(method).parameters
        return method(**given if "given" in names else {name: given[name] for name in names})

    @property
    def last(self) -> str:
        return list(self.layouts)[-1]

    @property
    def own(self) -> bool:
        """Whether the strategy's mathematics differ on purpose."""
        return is_own(self.strategy)

    @property
    def distance(self) -> float:
        """Of a strategy with its own numerics: how far a gradient may be from that of exact training, as a part."""
        return distance(self.strategy)

    def selected(self, layout: Layout) -> dict[str, Mapping[str, Any]]:
        """Name -> options of all strategies of a layout."""
        return {self.strategy: layout.options, **layout.beside}

    def results(self, ranks: Pool, layout: str, trial: Trial) -> list[TrialResult]:
        """The result of every rank, kept for the other tests of the session. Skips if the strategy refuses."""
        chosen = self.layouts[layout]
        return self.try_or_be_refused(ranks, trial, train, trial, self.selected(chosen), world=chosen.world)

    def expected(self, ranks: Pool, layout: str, trial: Trial) -> list[TrialResult]:
        """What every rank must equal."""
        plain = attrs.evolve(trial, micro=1, chunks=1, remat="none", compile=None)
        chosen = self.layouts[layout]
        if self.own:
            cloudpickle.register_pickle_by_value(sys.modules[type(self).__module__])  # ranks cannot import a test
        if self.own:
            reference, name = functools.partial(_reference, type(self)()), f"reference of {type(self)}"
            answer, itself = ranks.once(reference, chosen, plain, world=1, name=name)[0]
            if itself and declared_distance(self.strategy) is None:
                warnings.warn(
                    f"the reference of {self.strategy} is the strategy itself, in one process, which has the mistakes "
                    "of its ranks: let its class declare `distance`, such as 0.05, how far a gradient may be from that "
                    "of exact training",
                    stacklevel=2,
                )
        else:
            answer = self.of_one_process(ranks, layout, trial)
        return answer if isinstance(answer, list) else [answer] * chosen.world

    def of_one_process(self, ranks: Pool, layout: str, trial: Trial) -> TrialResult:
        """What one process computes under those strategies of a layout alone that extend the model."""
        plain = attrs.evolve(trial, micro=1, chunks=1, remat="none", compile=None)
        return ranks.once(train, plain, extending(self.selected(self.layouts[layout])), world=1)[0]

    def try_or_be_refused(self, ranks: Pool, trial: Trial, *call: Any, world: int) -> list[Any]:
        """The answers of `call` on ranks; if the strategy declares that it refuses this, the test that it does."""
        wanted = next((what for what in _asked(trial) if what in self.refuses), None)
        if wanted is None:
            return ranks.once(*call, world=world)
        raised = ""
        try:
            ranks.run(*call, world=world)
        except RankError as error:
            raised = str(error)
        assert raised, f"{self.strategy} declares that it refuses {wanted}, but it ran"
        said = [line for line in raised.splitlines() if ".PlaitError: " in line]
        assert said, f"{self.strategy} should refuse {wanted} by a PlaitError, but raised:\n{raised}"
        assert re.search(self.refuses[wanted], said[0]), f"the sentence for {wanted} is: {said[0]}"
        pytest.skip(f"{REFUSED}{said[0].partition('PlaitError: ')[2]}")

    def initial(self, ranks: Pool, trial: Trial) -> dict[str, Tensor]:
        """The initial parameters of one process, which are those of every strategy, whatever its mathematics."""
        plain = attrs.evolve(trial, steps=1, micro=1, chunks=1, remat="none", compile=None)
        return ranks.once(train, plain, self.extending, world=1)[0].initial

    @property
    def extending(self) -> dict[str, Mapping[str, Any]]:
        """Name -> options of the strategies in the last layout that extend the model: they belong to the model."""
        return extending(self.selected(self.layouts[self.last]))

    def extended(self, trial: Trial, strategies: Any = None) -> tuple[nn.Module, Any]:
        """A trial's model on the meta device, and its spec, as these of `strategies` (the last layout's) extend it."""
        assembly = self._assembly(Layout(1), trial, extending(strategies) if strategies else self.extending)
        assembly.extend()
        return assembly.model, assembly.run.spec

    def degrees(self, layout: Layout, trial: Trial | None = None) -> dict[str, int]:
        """Mesh axis -> degree in a layout, without starting ranks."""
        return {axis.name: axis.degree for axes in self._assembled(layout, trial) for axis in axes}

    def _assembled(self, layout: Layout, trial: Trial | None = None) -> list[Any]:
        found = self._assembly(layout, trial).layout
        return [found.dense, *found.views.values()]

    def _assembly(self, layout: Layout, trial: Trial | None = None, strategies: Any = None) -> Any:
        trial = trial or self.trying()
        model: Any = trial.build()
        several = made(self.selected(layout) if strategies is None else strategies).values()
        config = Config(precision=trial.precision()).with_value("launch.device", "cpu")
        return assembled(model, model.spec(), several, layout.world, config)

    def _hooks(self) -> list[str]:
        return plugins.hooks(self.strategy, plugins.create(self.strategy, self.layouts[self.last].options))


def _reference(suite: Capabilities, layout: Layout, trial: Trial) -> tuple[Any, bool]:
    """(its `reference`, whether the strategy under test took part in that)."""
    used: set[str] = set()

    def noting(selected: Mapping[str, Any]) -> dict[str, Any]:
        used.update(selected)
        return made(selected)

    with mock.patch("plait_testing.trial.made", noting):
        return suite.reference(layout, trial), suite.strategy in used


def _asked(trial: Trial) -> list[str]:
    """The features in a trial that a strategy may refuse."""
    asked = {
        "accumulation": trial.micro > 1,
        f"remat={trial.remat}": trial.remat != "none",
        "compile": trial.compile is not None,
        "mixed precision": trial.dtype == "mixed",
        "float32": trial.dtype == "float32",
        "loss.chunks": trial.chunks > 1,
        f"model {trial.model}": True,
    }
    return [what for what, is_asked in asked.items() if is_asked]
