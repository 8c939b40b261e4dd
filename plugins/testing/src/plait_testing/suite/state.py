"""Can it be saved, killed and continued? A checkpoint is independent of strategies."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from plait import PlaitError, canonical
from plait.host import Saver, Store, check, compose, load
from plait_testing import whole_run
from plait_testing.parity import apart, unequal, wrong_gradients
from plait_testing.pool import Pool, RankError
from plait_testing.strategies import extending, others
from plait_testing.suite.capabilities import SINGLE_STEPS, Capabilities
from plait_testing.suite.loadable import Loadable, place_of, wrongly_loaded, wrongly_ruled
from plait_testing.trial import Trial, full, of_all_stages, take_step


class State(Capabilities):
    def test_checkpoint_has_the_names_of_one_process(self, plait_ranks: Pool) -> None:
        """Canonical FQNs, a tied parameter once."""
        chosen = self.layouts[self.last]
        trial = self.trying_tied(dtype="float32")
        model, _ = self.extended(trial)
        buffers = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
        plain = {name for name, _ in model.named_parameters()} | buffers
        for got in plait_ranks.once(_names, trial, self.selected(chosen), world=chosen.world):
            names = {key.removeprefix("model.") for key in got if key.startswith("model.")}
            assert names == plain, f"missing {sorted(plain - names)[:3]}, not expected {sorted(names - plain)[:3]}"

    def test_checkpoint_holds_the_optimizer(self, plait_ranks: Pool) -> None:
        """All that it keeps in one process: of AdamW both moments and the step, for every parameter that trains."""
        chosen = self.layouts[self.last]
        trial = self.trying_tied(dtype="float32")
        names = {name for name, p in self.extended(trial)[0].named_parameters() if p.requires_grad}
        (one,) = plait_ranks.once(_names, trial, self.extending, world=1)
        wanted = {key for key in one if key.startswith("optimizer.")}
        of_adamw = {f"optimizer.{name}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq", "step")}
        assert self.optimizer or wanted >= of_adamw, f"one process lacks {sorted(of_adamw - wanted)[:3]}, ..."
        for got in plait_ranks.once(_names, trial, self.selected(chosen), world=chosen.world):
            assert wanted <= got, f"the checkpoint lacks {sorted(wanted - got)[:3]}, ..."

    def test_checkpoint_loads_in_other_layouts(
        self, plait_ranks: Pool, layout: str, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """What one process, this layout and the next two saved while training continued, loaded under this one: bitwise
        the same. So three layouts load each into each; of more, each is saved for three and loads three. Of replicas
        that differ as many go on from their own; another number loads what their strategy's rule says, or is refused.

        With the last layout, one process loads them all, and every other installed strategy what the last layout saved.
        """
        trial = self.trying_tied(dtype="float32")
        layouts = {name: (found.world, self.selected(found)) for name, found in self.layouts.items()}
        every = {"one process": (1, self.extending), **layouts}

        def saved(world: int, strategies: Any) -> tuple[Path, list[Loadable]]:
            key = repr(("saved", trial, world, strategies))
            if key not in plait_ranks.kept:
                folder = tmp_path_factory.mktemp("saved")
                plait_ranks.kept[key] = folder, plait_ranks.run(_save, trial, strategies, folder, world=world)
            return plait_ranks.kept[key]

        def loads(name: str, world: int, strategies: Any, others: Iterable[str]) -> None:
            found = {other: saved(*every[other]) for other in others}
            folders = [folder for folder, _ in found.values()]
            for rank, answers in enumerate(plait_ranks.run(_restore, trial, strategies, folders, world=world)):
                for (other, (_, before)), answer in zip(found.items(), answers, strict=True):
                    wrong = wrongly_loaded(answer, before)
                    assert wrong is None, f"{other} -> {name}, rank {rank}: {wrong}"

        number = list(layouts).index(layout)
        near = ([*layouts] * 2)[number : number + 3]
        loads(layout, *every[layout], dict.fromkeys(["one process", *near]))
        if layout == self.last:
            loads("one process", *every["one process"], layouts)
            for name, foreign in self._foreign().items():
                try:
                    loads(name, *foreign, [layout])
                except RankError as error:
                    if "PlaitError" not in str(error).splitlines()[0]:
                        raise
                    trial = self.trying(dtype="float32")  # it refuses tied parameters
                    loads(name, *foreign, [layout])

    def test_checkpoint_holds_what_one_process_holds(self, plait_ranks: Pool) -> None:
        """Before the first step the initial values, bitwise; after it AdamW's first moment, a tenth of the gradient;
        after each of three steps what the ranks hold: a strategy may act only every few steps."""
        chosen, trial = self.layouts[self.last], self.trying_tied(trains_with=None)  # AdamW, whose moments it knows
        initial = self.initial(plait_ranks, trial)
        expected = [] if self.own else self.expected(plait_ranks, self.last, trial)
        for rank, (before, moments, wrong_after) in enumerate(
            plait_ranks.run(_contents, trial, self.selected(chosen), self._params(trial), self.own, world=chosen.world)
        ):
            wrong = unequal(before, initial)
            assert wrong is None, f"rank {rank} would save other initial parameters: {wrong}"
            for step, each in wrong_after.items():
                assert each is None, f"rank {rank} would save other values after step {step} than it holds: {each}"
            if not self.own:
                held = attrs.evolve(expected[rank], gradients={name: 10 * moment for name, moment in moments.items()})
                off = wrong_gradients(held, expected[rank], 1e-9, self.extended(trial)[1])
                assert off is None, f"rank {rank} would save other moments: {off}"

    def test_two_runs_are_bitwise_equal(self, plait_ranks: Pool) -> None:
        from plait_testing.trial import train

        chosen, trial = self.layouts[self.last], self.trying(dtype="float32", steps=SINGLE_STEPS)
        once = self.try_or_be_refused(plait_ranks, trial, train, trial, self.selected(chosen), world=chosen.world)
        again = plait_ranks.run(train, trial, self.selected(chosen), world=chosen.world)
        for rank, (a, b) in enumerate(zip(once, again, strict=True)):
            assert a.losses == b.losses, f"losses on rank {rank}"
            assert (wrong := unequal(b.final, a.final)) is None, (
                f"parameters on rank {rank} after {SINGLE_STEPS} steps: {wrong}"
            )

    def test_a_run_equals_one_process(self, plait_ranks: Pool, tmp_path: Path) -> None:
        """The trainer on real text: losses, norms and counts of every step, and the validation's mean over tokens."""
        if self.own:
            pytest.skip("its mathematics are its own")
        chosen = self.layouts[self.last]
        runs = []
        for strategies, world in ((self.extending, 1), (self.selected(chosen), chosen.world)):
            runs.append(self._run_trainer(plait_ranks, strategies, tmp_path, world))
        one, many = runs
        assert [row["tokens"] for row in many] == [row["tokens"] for row in one]
        for key in ("val_loss", "loss", "grad_norm"):
            error, at = apart(*([row[key] for row in rows if key in row] for rows in (many, one)))
            assert error <= 1e-9, f"{key} is off by {error:.2e} at its {at}. value"

    def test_killed_and_resumed_is_bitwise_equal(self, plait_ranks: Pool, tmp_path: Path) -> None:
        """`plait train`, killed with all its ranks and started again, beside a trainer that nothing disturbs."""
        chosen = self.layouts[self.last]
        strategies, folder = self.selected(chosen), tmp_path / "runs" / "a"
        arguments = whole_run.overrides(strategies, tmp_path, chosen.world, "run.name=a", model=self.run_model)
        process = whole_run.start(arguments, tmp_path)
        whole_run.wait_for_step(folder, 5, process)
        whole_run.wait_for_checkpoint(folder, process)
        assert process.poll() is None, "it ended before it could be killed"
        whole_run.kill_all(process, folder)
        process.communicate()
        process = whole_run.start(arguments, tmp_path)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
        assert "checkpoint: resuming after step" in output, output
        undisturbed = self._run_trainer(plait_ranks, strategies, tmp_path, chosen.world, exact=False)
        a, b = map(whole_run.numbers, (undisturbed, whole_run.rows(folder)))
        different = [x[0] for x, y in zip(a, b, strict=True) if x != y]
        assert not different, f"steps {different} differ after the run was killed"

    def _run_trainer(
        self, ranks: Pool, strategies: Any, folder: Path, world: int, exact: bool = True
    ) -> list[dict[str, Any]]:
        """The rows of an undisturbed run; exact: in float64."""
        more = [f"precision.{which}=float64" for which in ("storage", "param", "reduce")] if exact else []
        given = whole_run.overrides(strategies, folder, world, "checkpoint.enabled=false", *more, model=self.run_model)
        config = check(compose(given), world).config
        own = folder / f"{world}-{len(strategies)}"
        own.mkdir()
        (own / "versions.json").write_text("{}", encoding="utf-8")
        return ranks.run(whole_run.run, config, own, world=world)[0]

    def _foreign(self) -> dict[str, tuple[int, dict[str, Mapping[str, Any]]]]:
        """Every other installed strategy alone, on two ranks, beside those that extend the model."""
        from plait_testing.suite.composition import trial_options

        found = {name: trial_options(name) for name in others(self.strategy)}
        names = [name for name in found if not extending({name: {}}) and _fits_two(name)]
        return {name: (2, {**self.extending, name: found[name]}) for name in names}

    def _params(self, trial: Trial) -> dict[str, bool]:
        """FQN of each parameter -> whether it trains."""
        return {name: p.requires_grad for name, p in self.extended(trial)[0].named_parameters()}


def _fits_two(name: str) -> bool:
    from plait_testing.suite.capabilities import Layout
    from plait_testing.suite.composition import trial_options

    alone = type("Alone", (Capabilities,), {"strategy": name})()
    try:
        alone._assembled(Layout(2, trial_options(name)))
    except PlaitError:
        return False  # needs other strategies, or more ranks
    return True


def _ready(trial: Trial, strategies: Mapping[str, Any], seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    applied = attrs.evolve(trial, seed=seed).apply(strategies)
    return applied, applied.optimizer(trial.optimizer)


def step(applied: Any, optimizer: torch.optim.Optimizer, trial: Trial, number: int) -> None:
    applied.steps = number
    take_step(applied, optimizer, trial, number)


def _contents(
    trial: Trial, strategies: Mapping[str, Any], params: Mapping[str, bool], own: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[int, str | None]]:
    """(parameters before a step, AdamW's first moments after it), by FQN, as a checkpoint would hold them; and for each
    of three steps the message if a checkpoint would hold something else than the live model and optimizer.

    params: FQN -> whether it trains. own: ranks may hold different values, each of which a checkpoint holds, and what
    their strategy's rule makes of them.
    """
    trial = attrs.evolve(trial, max_norm=math.inf)  # unclipped, the moments are a tenth of the gradients
    applied, optimizer = _ready(trial, strategies)
    state = of_all_stages(applied, {key: full(tensor) for key, tensor in applied.checkpoint()[0].items()})
    before = {name: state[f"model.{name}"] for name in sorted(params)}
    moments: dict[str, torch.Tensor] = {}
    wrong: dict[int, str | None] = {}
    for number in range(3):
        step(applied, optimizer, trial, number)
        held, live = Loadable.of(applied, optimizer), _live(applied, optimizer)
        if number == 0 and not own:
            moments = {name: held.common[f"optimizer.{name}.exp_avg"] for name in sorted(params) if params[name]}
        wrong[number + 1] = unequal({key: held.own[key] for key in live if key in held.own}, live)
        if own and not held.refuses:
            ruled = wrongly_ruled(held.common, live, applied)
            wrong[number + 1] = wrong[number + 1] or ruled
    return before, moments, wrong


def _live(applied: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What the ranks hold of every parameter, saved buffer, and of AdamW's moments, under the names of a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for part in applied.parts:
        kept = part.state_dict(keep_vars=True)
        buffers = {name: buffer for name, buffer in part.named_buffers() if name in kept}
        found |= {f"model.{canonical(name)}": full(each) for name, each in buffers.items()}
        for name, param in part.named_parameters():
            found[f"model.{canonical(name)}"] = full(param)
    for group in optimizer.param_groups:
        for name, param in zip(group["names"], group["params"], strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                if key in optimizer.state[param]:
                    found[f"optimizer.{name}.{key}"] = full(optimizer.state[param][key])
    return of_all_stages(applied, found)


def _names(trial: Trial, strategies: Mapping[str, Any]) -> set[str]:
    applied, optimizer = _ready(trial, strategies)
    step(applied, optimizer, trial, 0)
    return set(of_all_stages(applied, dict.fromkeys(applied.checkpoint(optimizer)[0])))


def _save(trial: Trial, strategies: Mapping[str, Any], folder: Path) -> Loadable:
    applied, optimizer = _ready(trial, strategies)
    step(applied, optimizer, trial, 0)
    saver = Saver(Store(folder / "checkpoints"), "async")
    saver.save(applied.checkpoint(optimizer)[0], 1)
    held = Loadable.of(applied, optimizer)
    step(applied, optimizer, trial, 1)  # training continues while a thread writes
    saver.wait()
    return held


def _restore(trial: Trial, strategies: Mapping[str, Any], folders: list[Path]) -> list[Loadable]:
    """What this rank holds after the checkpoint of each folder was loaded."""
    applied, optimizer = _ready(trial, strategies, seed=1)
    found = []
    for number, folder in enumerate(folders):
        path = Store(folder / "checkpoints").latest()
        assert path is not None
        try:
            load(path, *applied.checkpoint(optimizer))
        except PlaitError as error:
            found.append(Loadable(place_of(applied), refusal=str(error)))
        else:
            found.append(Loadable.of(applied, optimizer))
        step(applied, optimizer, trial, 2 + number)  # so that nothing of this one remains before the next
    return found
