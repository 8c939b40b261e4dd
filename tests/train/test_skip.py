"""`train.skip`: a step whose gradients spike or are not finite changes nothing, in any layout and after any resume."""

import math
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from plait.contract.errors import PlaitError
from plait.host import compose
from plait.testing import Trial
from plait.train import skip as module
from plait.train.skip import ENOUGH, MOST, WINDOW, Skips
from plait_testing.trial import held, share
from tests.helpers.in_parts import in_parts, part
from tests.helpers.layouts import LAYOUTS, in_one_process

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test

CALM = [1.0, 1.1, 0.9] * ENOUGH
DECIDED = {
    "not finite, from the first step on": (math.inf, [math.nan, 1.0, math.inf, -math.inf, 2.0], [1, 0, 1, 1, 0]),
    "a spike, once there is a usual norm": (3.0, [*CALM[:ENOUGH], 3.4, 2.9], [*[0] * ENOUGH, 1, 0]),
    "too early for a spike": (3.0, [*CALM[: ENOUGH - 1], 99.0], [0] * ENOUGH),
    "any height, if only finite norms count": (math.inf, [*CALM[:ENOUGH], 1e30], [0] * (ENOUGH + 1)),
    "a new level": (3.0, [*[1.0] * WINDOW, *[9.0] * 40], [*[0] * WINDOW, *[1] * (WINDOW // 2 + 1), *[0] * 7]),
}


@pytest.mark.parametrize("name", DECIDED)
def test_what_is_skipped(name):
    factor, norms, expected = DECIDED[name]
    skips = Skips(factor)
    assert [int(skips(torch.tensor(norm))) for norm in norms] == expected


def test_a_run_that_does_not_recover_ends():
    skips, nan = Skips(math.inf), torch.tensor(math.nan)
    assert all(skips(nan) for _ in range(MOST - 1))
    with pytest.raises(PlaitError, match=f"{MOST} steps in a row were skipped"):
        skips(nan)


class Spoils:
    """Multiplies the gradients of step `at` (from 1) of some ranks, when they are complete."""

    def __init__(self, at, factor, applied, rank=None):
        self.at, self.factor, self.applied = at, factor, applied
        self.mine = rank is None or dist.get_rank() == rank
        self.balanced = []  # steps after which strategies' `after_step` was called

    def clip(self):
        if self.applied.steps + 1 == self.at and self.mine:
            for param in self.applied.parameters():
                if param.grad is not None:
                    param.grad.mul_(self.factor)

    def balance(self):
        self.balanced.append(self.applied.steps)


def trained(strategies, model, factor, rank, skipping, usual):
    """(parameters after 5 steps, whether each step was skipped, whether step 3 left all as it was)."""
    trial = Trial(model, micro=2)
    applied = trial.apply(strategies)
    optimizer = applied.optimizer(trial.optimizer)
    skips, flags, kept = Skips(3.0) if skipping else None, [], True
    spoils = Spoils(3, factor, applied, rank)
    module.ENOUGH = usual
    try:
        for step in range(5):
            before = {key: tensor.clone() for key, tensor in applied.checkpoint(optimizer)[0].items()}
            batch, total = share(applied, trial, step)
            rows = -(-len(batch.tokens) // 2)
            done = applied.step(batch, optimizer, known(total), spoils, rows=rows, skip=skips)
            flags.append(done.skipped)
            if done.skipped:
                after = applied.checkpoint(optimizer)[0]
                kept = all(torch.equal(local(after[key]), local(tensor)) for key, tensor in before.items())
    finally:
        module.ENOUGH = ENOUGH
    assert spoils.balanced == [step for step, skipped in enumerate(flags, 1) if not skipped]
    return held(applied), flags, kept and applied.steps == 5


def known(total):
    return lambda dealt: lambda: total


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def compared(ranks, layout):
    """A spike on all ranks, and NaN on one alone, are skipped as one process skips a spike."""
    model, strategies = LAYOUTS[layout]
    one, flags, kept = in_one_process(ranks, trained, {}, model, 100.0, None, True, 2)
    assert (flags, kept) == ([False, False, True, False, False], True)
    for factor, rank in ((100.0, None), (math.nan, 1)):
        for end, flags, kept in ranks.run(trained, strategies, model, factor, rank, True, 2, world=2):
            assert (flags, kept) == ([False, False, True, False, False], True)
            for fqn, value in one.items():
                assert float((end[fqn] - value).norm()) <= 1e-10 * float(value.norm()), fqn


def decided(norms):
    """(what this rank decides at norms of its own, what it remembers of them)."""
    skips = Skips(3.0)
    return [skips(torch.tensor(norm[dist.get_rank()])) for norm in norms], skips.norms.tolist()


def test_all_ranks_skip_alike(plait_ranks):
    """Also if their norms differ, as under a strategy with mathematics of its own."""
    norms = [*[(1.0, 1.2)] * ENOUGH, (1.0, 9.0), (math.nan, 1.0), (1.0, 1.0)]
    one, other = plait_ranks.run(decided, norms, world=2)
    assert one == other
    assert one[0] == [False] * ENOUGH + [True, True, False]
    compared(plait_ranks, "pipeline")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout(plait_ranks, layout):
    compared(plait_ranks, layout)
    kept, skipping = (
        in_one_process(plait_ranks, trained, {}, LAYOUTS[layout][0], 100.0, None, skipping, 2)[0]
        for skipping in (False, True)
    )
    assert any(not torch.allclose(kept[fqn], value, rtol=1e-6) for fqn, value in skipping.items()), "it shows"


def run(config, folder, until):
    """A part of a run whose 8th step has no finite gradient, and whose 9th spikes."""

    def spoil(trainer):
        trainer.watch.all += [Spoils(8, math.nan, trainer.applied, 0), Spoils(9, 100.0, trainer.applied)]

    module.ENOUGH = 6
    try:
        return part(config, folder, until, spoil)
    finally:
        module.ENOUGH = ENOUGH


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("states", ["bfloat16", "8bit"])
def test_a_resumed_run_skips_and_rounds_as_it_would_have(plait_ranks, tmp_path, states):
    """The 9th step is a spike by norms of steps before the stop, after the 5th."""
    ends = []
    for name, stops in (("whole", [None]), ("resumed", [5, None])):
        parts = [({"fsdp2": {}}, 2, until) for until in stops]
        more = ("train.skip=5", f"precision.optimizer={states}")
        ends.append(in_parts(plait_ranks, tmp_path, name, parts, *more, run=run))
    (whole, end), (resumed, other) = ends
    assert [row["skipped"] for row in whole] == [row["step"] in (8, 9) for row in whole]
    assert [math.isnan(row["grad_norm"]) for row in whole] == [row["step"] == 8 for row in whole]
    assert [row["step"] for row in resumed] == list(range(1, 11))
    numbers = [[(row["step"], row["loss"], row["skipped"], row["lr"]) for row in rows] for rows in (whole, resumed)]
    assert numbers[0] == numbers[1]
    assert all(torch.equal(end[fqn], other[fqn]) for fqn in end)


MOVES = [("fsdp2", "tensor_parallel"), ("tensor_parallel", "zero"), ("zero", "pipeline"), ("pipeline", "fsdp2")]


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed"), MOVES)
def test_a_run_goes_on_skipping_in_another_layout(plait_ranks, tmp_path, saved, resumed):
    """In float64: the same steps are skipped, and losses are within 1e-9 of one process, stated before."""
    found = []
    wide = [f"precision.{key}=float64" for key in ("storage", "param", "reduce")]
    for name, parts in (("one", [({}, 1, None)]), ("other", [({saved: {}}, 2, 5), ({resumed: {}}, 2, None)])):
        rows, _ = in_parts(plait_ranks, tmp_path, name, parts, "train.skip=5", *wide, run=run)
        found.append(rows)
    one, other = found
    assert (
        [row["skipped"] for row in one]
        == [row["skipped"] for row in other]
        == [step in (8, 9) for step in range(1, 11)]
    )
    assert all(math.isclose(a["loss"], b["loss"], rel_tol=1e-9) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("value", ["0.5", "-1", "nan", "often"])
def test_what_is_no_factor(value):
    with pytest.raises(PlaitError, match=r"train\.skip"):
        compose([f"train.skip={value}"])
