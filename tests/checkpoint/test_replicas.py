"""Of ranks that differ on purpose a checkpoint holds each one's own, of parameters, optimizer and strategy."""

import math
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from plait import MeshAxis, PlaitError, hookimpl
from plait.check.resume import find_checkpoint
from plait.checkpoint.load import load
from plait.checkpoint.reader import Reader
from plait.checkpoint.replicas import _digest as digest
from plait.checkpoint.save import Saver
from plait.checkpoint.store import Manifest, Store
from plait.host import check, compose
from plait.records.run_folder import RunFolder
from plait.strategies.order import order
from plait.testing import Trial, full, raises_about, take_step, unequal
from plait_models.convert import convert


@attrs.define(slots=False)
class Apart:
    """Workers that never meet, each with a count of its own."""

    degree: int = -1
    phase = "runtime"
    numerics = "own"
    replicas = "first"

    def __attrs_post_init__(self) -> None:
        self.seen = torch.zeros(2, dtype=torch.int64)

    @hookimpl
    def build_mesh(self) -> list[MeshAxis]:
        return [MeshAxis("worker", self.degree, splits="batch", sums=False)]

    @hookimpl
    def state(self) -> dict[str, torch.Tensor]:
        return {"seen": self.seen}

    @hookimpl
    def after_step(self) -> None:
        self.seen += 1 + dist.get_rank()


@attrs.define(slots=False)
class Mean(Apart):
    replicas = "mean"


@attrs.define(slots=False)
class Alone(Apart):
    replicas = "refuse"


def held(applied: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {key: full(tensor).clone() for key, tensor in applied.checkpoint(optimizer)[0].items()}


def save(kind: type[Apart], mode: str, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(what this rank has after two steps, which are saved; after a third)."""
    applied = Trial().apply({}, [kind()])
    optimizer = applied.optimizer(Trial().optimizer)
    for number in range(2):
        take_step(applied, optimizer, Trial(), number)
    before = held(applied, optimizer)
    saver = Saver(Store(folder), mode)
    saver.save(applied.checkpoint(optimizer)[0], 2)
    assert unequal(held(applied, optimizer), before) is None
    take_step(applied, optimizer, Trial(), 2)
    saver.wait()
    return before, held(applied, optimizer)


def resume(extra: list[Any], folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    trial = Trial(seed=1)
    applied = trial.apply({"ddp": {}} if not extra else {}, extra)
    optimizer = applied.optimizer(trial.optimizer)
    load(Store(folder).latest(), *applied.checkpoint(optimizer))
    before = held(applied, optimizer)
    take_step(applied, optimizer, trial, 2)
    return before, held(applied, optimizer)


OTHERS = [(Mean, "sync"), (Apart, "sync"), (Apart, "async")]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [(Mean, "async"), *(pytest.param(*way, marks=pytest.mark.slow) for way in OTHERS)],
)
def test_as_many_go_on_bitwise_and_others_from_the_rule(plait_ranks, tmp_path, kind, mode):
    saved = plait_ranks.run(save, kind, mode, tmp_path, world=2)
    (a, _), (b, _) = saved
    assert not any(torch.equal(a[key], b[key]) for key in a if key.endswith((".weight", ".exp_avg")))
    for expected, found in zip(saved, plait_ranks.run(resume, [kind()], tmp_path, world=2), strict=True):
        for ours, theirs in zip(expected, found, strict=True):
            assert unequal(theirs, ours) is None
    ruled = {key: (a[key] + b[key]) / 2 if kind is Mean and a[key].is_floating_point() else a[key] for key in a}
    for world, extra in ((1, []), (2, []), (4, [kind()])):
        for found, _ in plait_ranks.run(resume, extra, tmp_path, world=world):
            assert found.keys() <= ruled.keys()
            assert unequal(found, {key: ruled[key] for key in found}) is None


def test_another_number_may_be_refused(plait_ranks, tmp_path):
    """In one sentence, whatever the other run's strategies are; as many go on bitwise."""
    saved = plait_ranks.run(save, Alone, "sync", tmp_path, world=2)
    for expected, found in zip(saved, plait_ranks.run(resume, [Alone()], tmp_path, world=2), strict=True):
        assert unequal(found[1], expected[1]) is None
    sentence = (
        "strategy 'alone' lets no other number of replicas go on than was saved (replicas = 'refuse'): the checkpoint "
        "of step 2 has 2 along the axis 'worker', and here "
    )
    for world, extra, here in ((1, [], "is 1"), (2, [], "is 1"), (4, [Alone()], "are 4"), (4, [Apart()], "are 4")):
        with pytest.raises(Exception, match=re.escape(sentence + here)):
            plait_ranks.run(resume, extra, tmp_path, world=world)
    with pytest.raises(PlaitError, match=re.escape(sentence + "is 1")):
        convert(Trial().build(), Store(tmp_path).latest(), tmp_path / "weights", "hf")


def test_the_command_refuses_another_number_before_a_rank_starts(tmp_path):
    given = ["strategy=[local_sgd]", "model.n_layers=1", "train.seq_len=16", "launch.device=cpu"]
    checked, folder = check(compose(given), 4), RunFolder(tmp_path)
    parameters = {name: (shape, "float32") for name, shape in checked.shapes.items()}
    path = tmp_path / "checkpoints" / "step-3.tmp"
    path.mkdir(parents=True)
    manifest = Manifest(3, data={"replicas": {"worker": ["local_sgd", 2]}}, parameters=parameters)
    Store(path.parent).commit(path, manifest)
    with raises_about("strategy.local_sgd", 4, (2,)):
        find_checkpoint(checked, folder, print)


def test_what_is_equal_is_saved_once(plait_ranks, tmp_path):
    """Such as the number of the optimizer's steps, or everything before the first."""
    plait_ranks.run(save, Apart, "sync", tmp_path, world=2)
    names = Reader(Store(tmp_path).latest()).shapes
    assert any(name.startswith("replica.worker 0 of 2.model.") for name in names)
    assert any(name.startswith("replica.worker 1 of 2.strategy.apart.seen") for name in names)
    assert not any(name.endswith(".step") for name in names if name.startswith("replica."))


def save_without_a_state(folder: Path) -> str:
    """The name of a parameter that the second worker's optimizer has no state of."""
    applied = Trial().apply({}, [Mean()])
    optimizer = applied.optimizer(Trial().optimizer)
    take_step(applied, optimizer, Trial(), 0)
    name, param = next(iter(applied.parts[0].named_parameters()))
    if dist.get_rank():
        del optimizer.state[param]
    Saver(Store(folder), "sync").save(applied.checkpoint(optimizer)[0], 1)
    return name


def test_state_that_one_replica_has_is_its_own(plait_ranks, tmp_path):
    name = plait_ranks.run(save_without_a_state, tmp_path, world=2)[0]
    names = Reader(Store(tmp_path).latest()).shapes
    assert [each for each in names if each.endswith(f"{name}.exp_avg")] == [
        f"replica.worker 0 of 2.optimizer.{name}.exp_avg"
    ]
    for world, extra in ((2, [Mean()]), (1, [])):
        plait_ranks.run(resume, extra, tmp_path, world=world)


@pytest.mark.parametrize("shape", [(), (3,), (40, 60), (2048,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_a_digest_sees_one_element_and_the_order(shape, dtype):
    first = (torch.arange(math.prod(shape)).reshape(shape) % 7 > 2).to(dtype)
    other = first.clone()
    other.view(-1)[-1] = not other.view(-1)[-1]
    assert digest(first) == digest(first.clone()) != digest(other)
    if math.prod(shape) > 1:
        assert digest(other) != digest(other.view(-1).roll(1).view(shape))


def test_another_rule_is_refused():
    with pytest.raises(PlaitError, match="has replicas = 'sum'; it is 'mean', 'first' or 'refuse'"):
        order({"apart": type("Odd", (Apart,), {"replicas": "sum"})()})
