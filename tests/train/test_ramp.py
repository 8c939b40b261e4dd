"""`train.ramp`: batches and rows that grow within a run, counted in samples, so exact in every layout and resume."""

import math
import sys

import cloudpickle
import pytest
import torch

from plait import Batch
from plait.contract.config import Train
from plait.contract.errors import PlaitError
from plait.data.ramp import Ramp, cut
from plait.host import check, compose
from plait_testing import whole_run
from tests.helpers.in_parts import in_parts

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test

RAMP = [
    {"until": 7, "global_batch_size": 2, "seq_len": 8},
    {"until": 18, "global_batch_size": 4},
]  # none at a step's end
ON_COMMAND = "train.ramp=[{until: 8, global_batch_size: 4, seq_len: 8}, {until: 21, seq_len: 16}]"
STABLE = ("schedule.decay_steps=3", "schedule.decay=linear")  # warm-up, a plateau, and a fall to 0


def test_shapes_follow_the_samples():
    ramp = Ramp.of(Train(seq_len=32, ramp=RAMP), 8)
    seen, samples = [], 0
    for step in range(12):
        assert ramp.after(0, step) == samples
        assert ramp.after(ramp.after(0, step), 12 - step) == ramp.after(0, 12), "from any step on"
        shape = ramp.at(samples)
        seen.append((shape.samples, shape.seq_len))
        samples += shape.samples
    assert seen == [(2, 8)] * 4 + [(4, 32)] * 3 + [(8, 32)] * 5


def test_a_cut_batch_has_the_same_tokens_in_order():
    tokens = torch.arange(24).view(3, 8)
    positions = torch.arange(8).expand(3, 8)
    batch = cut(Batch(tokens, tokens + 1, positions, torch.tensor([0, 1, 0])), 4)
    assert batch.tokens.tolist() == tokens.view(6, 4).tolist()
    assert torch.equal(batch.labels, batch.tokens + 1)
    assert batch.positions is not None
    assert batch.sources is not None
    assert batch.positions[1].tolist() == [4, 5, 6, 7]
    assert batch.sources.tolist() == [0, 0, 1, 1, 0, 0]


def runs(ranks, folder, name, parts, *more):
    return in_parts(ranks, folder, name, parts, ON_COMMAND, *STABLE, *more)


@pytest.mark.timeout(120)
def test_a_resumed_run_goes_on_in_the_ramp(plait_ranks, tmp_path):
    """The run stops after the third step, which begins with sample 8, in the second stage."""
    whole, end = runs(plait_ranks, tmp_path, "whole", [({"fsdp2": {}}, 2, None)])
    resumed, other = runs(plait_ranks, tmp_path, "resumed", [({"fsdp2": {}}, 2, 3), ({"fsdp2": {}}, 2, None)])
    assert [(row["global_batch_size"], row["seq_len"]) for row in whole] == [(4, 8)] * 2 + [(8, 16)] * 2 + [(8, 32)] * 6
    assert [row["tokens"] for row in whole[:4]] == [4 * 32, 8 * 32, 16 * 32, 24 * 32]
    numbers = [
        [(row["step"], row["loss"], row["grad_norm"], row["tokens"]) for row in rows] for rows in (whole, resumed)
    ]
    assert numbers[0] == numbers[1]
    assert all(torch.equal(end[fqn], other[fqn]) for fqn in end)


LAYOUTS = {
    "ddp": {"ddp": {}},
    "tensor ranks": {"tensor_parallel": {"degree": 2}},
    "sequences": {"context_parallel": {"degree": 2}, "ddp": {}},
    "stages": {"pipeline": {"degree": 2}},
    "shards": {"fsdp2": {}},
    "divided states": {"zero": {}},
}
MOVES = [("shards", "tensor ranks"), ("tensor ranks", "stages"), ("stages", "divided states"), ("sequences", "shards")]
WIDE = [f"precision.{key}=float64" for key in ("storage", "param", "reduce")]


def as_one_process(ranks, folder, parts):
    """In float64: losses within 1e-9, stated before it was measured."""
    one, _ = runs(ranks, folder, "one", [({}, 1, None)], *WIDE)
    other, _ = runs(ranks, folder, "other", parts, *WIDE)
    assert [row["step"] for row in one] == [row["step"] for row in other] == list(range(1, 11))
    assert all(math.isclose(a["loss"], b["loss"], rel_tol=1e-9) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_process(plait_ranks, tmp_path, layout):
    as_one_process(plait_ranks, tmp_path, [(LAYOUTS[layout], 2, None)])


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed"), MOVES)
def test_it_goes_on_in_another_layout(plait_ranks, tmp_path, saved, resumed):
    """It stops in the second stage of the ramp."""
    as_one_process(plait_ranks, tmp_path, [(LAYOUTS[saved], 2, 3), (LAYOUTS[resumed], 2, None)])


WRONG = {
    "train.ramp=[{until: 8}]": ("train.ramp", None),
    "train.ramp=[{until: 8, rows: 2}]": ("train.ramp", None),
    "train.ramp=[{global_batch_size: 2}]": ("train.ramp", None),
    "train.ramp=[{until: 8, seq_len: 8}, {until: 8, seq_len: 16}]": ("train.ramp", None),
    "train.ramp=[{until: 8, seq_len: 24}]": ("train.ramp[0].seq_len", "a divisor of 32"),
    "train.ramp=[{until: 8, global_batch_size: 3}]": ("train.ramp[0].global_batch_size", (2, 4, 6, 8)),
    "train.ramp=[{until: 8, global_batch_size: 16}]": ("train.ramp[0].global_batch_size", (2, 4, 6, 8)),
    "train.epochs=1 train.ramp=[{until: 8, seq_len: 8}]": ("train.ramp", (None,)),
}


@pytest.mark.parametrize("given", WRONG)
def test_what_is_no_ramp(tmp_path, given):
    first, _, second = given.partition(" train.ramp")
    more = [first, f"train.ramp{second}"] if second else [given]
    with pytest.raises(PlaitError) as caught:
        check(compose(whole_run.overrides({}, tmp_path, 1, *more)), 1)
    key, fits = WRONG[given]
    assert caught.value.key == key, caught.value
    assert fits is None or caught.value.fits == fits


def test_every_stage_divides_into_the_batches_of_the_ranks():
    ramp = Ramp.of(Train(global_batch_size=16, ramp=[{"until": 8, "global_batch_size": 6}]), 16)
    ramp.check(3, 2)
    with pytest.raises(PlaitError, match=r"must be a multiple of 4 .* on 2 data ranks") as caught:
        ramp.check(2, 2)
    assert caught.value.fits == (4, 8, 12, 16)
