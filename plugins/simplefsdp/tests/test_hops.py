"""From fsdp2 to simplefsdp and back in the middle of a run: as if nothing had happened."""

import pytest

pytest.importorskip("plait_fsdp2")

import attrs

from plait.testing.parity import unequal
from plait.testing.trial import Trial, take_step, whole

SLOW = pytest.mark.slow
STEPS = 4  # under each
FSDP2, SIMPLE = {"fsdp2": {}}, {"simplefsdp": {}}


def part_of_a_run(trial, strategies, folder, first, steps):
    """Steps `first` to `first + steps` (from 0) after the latest checkpoint, and one more checkpoint.

    Returns their losses and norms, and the parameters at the end.
    """
    from plait.checkpoint.load import load
    from plait.checkpoint.save import Saver
    from plait.checkpoint.store import Store

    applied = trial.apply(strategies)
    optimizer = trial.optimizer(applied.parameters())
    store = Store(folder)
    if first:
        load(store.latest(), *applied.checkpoint(optimizer))
    losses, norms = [], []
    for step in range(first, first + steps):
        loss, norm = take_step(applied, optimizer, trial, step)
        losses.append(loss)
        norms.append(norm)
    saver = Saver(store, "sync")
    saver.save(applied.checkpoint(optimizer)[0], first + steps)
    saver.wait()
    return losses, norms, whole(applied.parts[0])


COMPILED = [("llama3", 2), ("tied", 2), ("moe", 2)]


@pytest.mark.parametrize(
    ("model", "world", "compile"),
    [("llama3", 2, None), *(pytest.param(*one, "aot_eager", marks=SLOW) for one in COMPILED)],
)
def test_there_and_back(plait_ranks, tmp_path, model, world, compile):
    plain = Trial(model, dtype="float32")
    planned = attrs.evolve(plain, compile=compile)
    undisturbed = plait_ranks.run(part_of_a_run, plain, FSDP2, tmp_path / "one", 0, 3 * STEPS, world=world)
    losses, norms = [], []
    for i, (trial, strategies) in enumerate([(plain, FSDP2), (planned, SIMPLE), (plain, FSDP2)]):
        found = plait_ranks.run(part_of_a_run, trial, strategies, tmp_path / "many", i * STEPS, STEPS, world=world)
        losses += found[0][0]
        norms += found[0][1]
    assert losses == undisturbed[0][0]
    assert norms == undisturbed[0][1]
    for (_, _, ours), (_, _, theirs) in zip(found, undisturbed, strict=True):
        assert unequal(ours, theirs) is None
