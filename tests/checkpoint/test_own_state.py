"""What a strategy or an observer keeps is saved, resharded, resumed and left alone as the contract says."""

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch.distributed.tensor import DTensor

from plait import hookimpl, is_loaded
from plait.checkpoint.load import load
from plait.checkpoint.restore import restore
from plait.checkpoint.save import Saver
from plait.checkpoint.store import Store
from plait.testing import Trial, full, take_step, unequal, whole
from plait_testing import whole_run
from plait_testing.pool import RankError
from tests.helpers.fakes import distribution

STRATEGY = '''
import attrs, torch
from plait import hookimpl

@attrs.define(slots=False)
class Keeper:
    """A momentum over parameters, by which they move on, and a count of steps."""

    phase = "runtime"
    numerics = "own"

    def __attrs_post_init__(self):
        self.kept = {}

    @hookimpl
    def state(self, model):
        with torch.no_grad():
            for name, param in model.named_parameters():
                if name not in self.kept:
                    self.kept[name] = torch.zeros_like(param)
        self.kept.setdefault("count", torch.zeros((), dtype=torch.int64))
        return self.kept

    @hookimpl
    def after_step(self, model):
        kept = self.state(model)
        with torch.no_grad():
            for name, param in model.named_parameters():
                kept[name].mul_(0.9).add_(param, alpha=0.01)
                param.add_(kept[name], alpha=0.1)
        kept["count"] += 1
'''
scope: dict[str, Any] = {"__name__": __name__}
exec(STRATEGY, scope)
Keeper = scope["Keeper"]


class Seen:
    """An observer that counts steps."""

    def __init__(self) -> None:
        self.steps = torch.zeros((), dtype=torch.int64)

    def state(self, applied: Any) -> dict[str, torch.Tensor]:
        return {"steps": self.steps}


def ready(beside: dict[str, Any], keeper: Any, seed: int = 0) -> tuple[Any, torch.optim.Optimizer, Seen]:
    trial = Trial(seed=seed)
    applied = trial.apply(beside, [keeper] if keeper else [])
    seen = Seen()
    if keeper:
        applied.observers = {"seen": seen}
    return applied, applied.optimizer(trial.optimizer), seen


def steps(applied: Any, optimizer: torch.optim.Optimizer, seen: Seen, numbers: range) -> None:
    for number in numbers:
        take_step(applied, optimizer, Trial(), number)
        seen.steps += 1


def kept(keeper: Any) -> dict[str, torch.Tensor]:
    return {name: full(tensor).clone() for name, tensor in keeper.kept.items()}


def save(beside: dict[str, Any], make: Any, folder: Path) -> tuple[Any, ...]:
    """(what it keeps after 2 steps, which are saved, then and after a third the parameters, and what it keeps)."""
    keeper = make()
    applied, optimizer, seen = ready(beside, keeper)
    steps(applied, optimizer, seen, range(2))
    before = kept(keeper) if keeper else None
    Saver(Store(folder), "sync").save(applied.checkpoint(optimizer)[0], 2)
    here = whole(applied.parts[0])
    steps(applied, optimizer, seen, range(2, 3))
    return before, here, whole(applied.parts[0]), kept(keeper) if keeper else None


def resume(beside: dict[str, Any], make: Any, folder: Path) -> tuple[Any, ...]:
    """(lines, what is loaded of what it keeps, the same as `save` returns, and the steps of the observer)."""
    keeper, lines = make(), list[str]()
    applied, optimizer, seen = ready(beside, keeper, seed=1)
    restore(Store(folder), applied, optimizer, None, Store(folder).latest, lines.append)
    loaded = {name: is_loaded(tensor) for name, tensor in keeper.kept.items()} if keeper else None
    before, here = kept(keeper) if keeper else None, whole(applied.parts[0])
    watched = int(seen.steps), is_loaded(seen.steps)
    steps(applied, optimizer, seen, range(2, 3))
    return lines, loaded, (before, here, whole(applied.parts[0]), kept(keeper) if keeper else None), watched


LAYOUTS = {"fsdp2": (2, {"fsdp2": {}}), "ddp": (2, {"ddp": {}}), "one": (1, {})}


@pytest.mark.parametrize("saved", [x if x == "fsdp2" else pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS])
def test_any_layout_loads_it_and_the_same_goes_on_bitwise(plait_ranks, tmp_path, saved):
    world, beside = LAYOUTS[saved]
    expected = plait_ranks.run(save, beside, Keeper, tmp_path, world=world)[0]
    assert any(tensor.count_nonzero() for tensor in expected[0].values())
    for name, (ranks, other) in LAYOUTS.items():
        for lines, loaded, found, watched in plait_ranks.run(resume, other, Keeper, tmp_path, world=ranks):
            assert (lines, set(loaded.values()), watched) == ([], {True}, (2, True))
            assert unequal(found[0], expected[0]) is None
            assert unequal(found[1], expected[1]) is None
            if name == saved:
                assert unequal(found[2], expected[2]) is None
                assert unequal(found[3], expected[3]) is None


def test_newly_selected_it_starts_anew_with_one_line(plait_ranks, tmp_path):
    plait_ranks.run(save, {"ddp": {}}, lambda: None, tmp_path, world=2)
    for world, beside in LAYOUTS.values():
        for lines, loaded, found, watched in plait_ranks.run(resume, beside, Keeper, tmp_path, world=world):
            assert lines == [
                "strategy 'keeper' has no state in the checkpoint: it starts anew",
                "observer 'seen' has no state in the checkpoint: it starts anew",
            ]
            assert (set(loaded.values()), watched) == ({False}, (0, False))
            assert not any(tensor.count_nonzero() for tensor in found[0].values())


def test_without_it_a_run_ignores_its_state(plait_ranks, tmp_path):
    expected = plait_ranks.run(save, {"ddp": {}}, Keeper, tmp_path, world=2)[0]
    for world, beside in LAYOUTS.values():
        for lines, _, found, _ in plait_ranks.run(resume, beside, lambda: None, tmp_path, world=world):
            assert lines == []
            assert unequal(found[1], expected[1]) is None


@attrs.define(slots=False)
class Returns:
    """Keeps what `answer(model)` returns, at each call."""

    answer: Any
    phase = "runtime"

    @hookimpl
    def state(self, model: Any) -> Any:
        return self.answer(model)


def shares(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}


def load_into_copies(folder: Path) -> None:
    applied, optimizer, _ = ready({}, Returns(lambda model: {"a": torch.zeros(2)}))
    Saver(Store(folder), "sync").save(applied.checkpoint(optimizer)[0], 1)
    load(Store(folder).latest(), *applied.checkpoint(optimizer))


def checkpoint_of(beside: dict[str, Any], answer: Any) -> list[str]:
    applied, optimizer, _ = ready(beside, Returns(answer))
    return list(applied.checkpoint(optimizer)[0])


def test_a_share_that_says_it_is_whole_is_refused(plait_ranks):
    said = r"strategy 'returns' keeps '[\w.]+' of shape \(.*\), this rank's share of the parameter of that name"
    with pytest.raises(RankError, match=said):
        plait_ranks.run(checkpoint_of, {"fsdp2": {}}, shares, world=2)


def test_copies_are_refused_where_loading_would_be_lost(plait_ranks, tmp_path):
    with pytest.raises(RankError, match="strategy 'returns' returned another tensor as 'a' of its state than before"):
        plait_ranks.run(load_into_copies, tmp_path, world=1)


def save_other_values(beside: dict[str, Any], folder: Path) -> None:
    answer = {"a": torch.tensor(float(torch.distributed.get_rank()))}
    applied, optimizer, _ = ready(beside, Returns(lambda model: answer))
    Saver(Store(folder), "sync").save(applied.checkpoint(optimizer)[0], 1)


@pytest.mark.parametrize("beside", [{"ddp": {}}, {"fsdp2": {}}])
def test_a_tensor_that_differs_between_ranks_is_refused(plait_ranks, tmp_path, beside):
    with pytest.raises(
        RankError, match="'a' of strategy 'returns' differs between rank 0 and rank 1, and a checkpoint"
    ):
        plait_ranks.run(save_other_values, beside, tmp_path, world=2)
    assert Store(tmp_path).found() == []


@attrs.define(slots=False)
class Squatter:
    """Answers the hook `checkpoint` with a name that is not its own."""

    key: str

    @hookimpl
    def checkpoint(self) -> Any:
        return {self.key: torch.zeros(2)}


def squat(key: str) -> None:
    Trial().apply({}, [Squatter(key)]).checkpoint()


@pytest.mark.parametrize("key", ["strategy.other.a", "observer.seen.steps", "replica.worker 0 of 2.model.a"])
def test_reserved_names_are_refused(plait_ranks, key):
    with pytest.raises(RankError, match=r"from its hook 'checkpoint', which must return a dict of tensors by name \("):
        plait_ranks.run(squat, key, world=1)


@pytest.mark.slow
def test_killed_and_resumed_is_bitwise_equal(plait_ranks, tmp_path, monkeypatch):
    """`plait train` with an installed package, beside a run that nothing disturbs; then once without the package's
    strategy."""
    packages = tmp_path / "packages"
    packages.mkdir()
    distribution(packages, "plait-keeper", {"keeper": "Keeper"}, code=STRATEGY)
    more = ("checkpoint.interval=2", "validation.interval=0", "train.steps=8")
    given = {"keeper": {}, "fsdp2": {}}
    rows = {}
    for name in ("killed", "undisturbed"):
        arguments = whole_run.overrides(given, tmp_path, 2, f"run.name={name}", *more)
        folder, env = tmp_path / "runs" / name, {"PYTHONPATH": str(packages)}
        if name == "killed":
            process = whole_run.start(arguments, tmp_path, env)
            whole_run.wait_for_step(folder, 3, process)
            whole_run.wait_for_checkpoint(folder, process)
            whole_run.kill_all(process, folder)
            process.communicate()
        process = whole_run.start(arguments, tmp_path, env)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
        assert ("checkpoint: resuming after step" in output) == (name == "killed"), output
        assert "anew" not in output
        rows[name] = whole_run.numbers(whole_run.rows(folder))
    assert rows["killed"] == rows["undisturbed"]
    newest = Store(tmp_path / "runs" / "killed" / "checkpoints").latest()
    arguments = whole_run.overrides({}, tmp_path, 1, "run.name=without", *more, f"checkpoint.load={newest}")
    process = whole_run.start([*arguments, "train.steps=9"], tmp_path)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert re.search("resuming after step 8", output)
