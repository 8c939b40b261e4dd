"""`plait.testing.compare`: right code of plain torch agrees, and a mistake is named with its parameter and kind."""

import os
import time

import attrs
import pytest
import torch
from torch import nn

from plait import PlaitError
from plait.testing import Parallel, compare, raises_about, random_tokens
from plait_testing.foreign.rounding import _of_numbers
from tests.helpers import foreign, foreign_parts
from tests.helpers.foreign import RIGHT, comparison, right
from tests.helpers.foreign_bugs import BUGS

FEW = dict.fromkeys(("saved", "steps", "accumulation", "recomputation", "documents", "frozen"), "asked elsewhere")


def found(report):
    return {answer.key: answer.status for answer in report.answers}


def test_fsdp2_agrees(plait_ranks):
    report = compare(right("fsdp2", off={k: v for k, v in FEW.items() if k != "saved"}), plait_ranks)
    assert report.agrees, report.text()
    asked = {key for key, status in found(report).items() if status == "ok"}
    assert asked == {"initial", "loss", "gradients", "norm", "saved", "unequal"}
    assert "asked elsewhere" in report.text()


DTYPES = ("float64", "float32", "bfloat16")
QUICK = ("fsdp1", "float64")  # fsdp2: above


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) == QUICK else pytest.mark.slow)
        for name in RIGHT
        for dtype in DTYPES
    ],
)
def test_right_code_agrees(plait_ranks, name, dtype):
    report = compare(right(name, dtype=dtype), plait_ranks)
    assert report.agrees, report.text()
    assert sum(status == "ok" for status in found(report).values()) >= 9, report.text()


def averaged_twice(model, batch):
    return foreign.loss(model, batch) / batch.ranks


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_sum_is_told_from_rounding_in_fp8(plait_ranks, dtype):
    given = {"dtype": dtype, "rounded": foreign.in_fp8}
    agrees = compare(comparison(foreign.sharded_in_fp8, {"dp": 2}, **given), plait_ranks)
    assert agrees.agrees, agrees.text()
    gradients = next(each.finding for each in agrees.answers if each.key == "gradients")
    assert gradients.error > 1e-2  # it is fp8, and no float32
    wrong = compare(comparison(foreign.sharded_in_fp8, {"dp": 2}, loss=averaged_twice, **given), plait_ranks)
    assert (wrong.first.cause.kind, wrong.first.cause.axis) == ("divided", "dp"), wrong.text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_missing_sum_is_told_from_rounding(plait_ranks, dtype):
    bug = BUGS[UNSUMMED]
    report = compare(comparison(bug.parallelize, bug.mesh, off=FEW, dtype=dtype), plait_ranks)
    assert (report.first.parameter, report.first.cause.kind) == (bug.parameter, bug.kind), report.text()


def test_a_number_is_not_nearer_than_its_own_rounding():
    assert _of_numbers([[1.0], [1.0]], [1.0], "bfloat16") >= torch.finfo(torch.bfloat16).eps


UNSUMMED = "a norm is not summed over tensor ranks"


@pytest.mark.parametrize("name", BUGS)
def test_a_mistake_is_named(plait_ranks, name):
    bug = BUGS[name]
    off = {key: reason for key, reason in FEW.items() if key != bug.question}
    report = compare(comparison(bug.parallelize, bug.mesh, off=off, **bug.changes), plait_ranks)
    assert report.exit_code == 1
    if not bug.kind:
        assert [key for key, status in found(report).items() if status == "wrong"] == [bug.question], report.text()
        return
    first = report.first
    named = (first.question, first.parameter, first.cause.kind, first.cause.axis)
    assert named == (bug.question, bug.parameter, bug.kind, bug.axis), report.text()
    assert first.cause.sentence in report.text()


def smooths(whole):
    given = {"loss": foreign_parts.smoothed(whole), "off": {"documents": "it takes no positions"}}
    return comparison(foreign_parts.divided_head, {"tp": 2}, **given)


def routes(hidden):
    off = {"norm": "parts by hand", "saved": "parts by hand"}
    return comparison(foreign_parts.divided_experts(hidden), {"tp": 2}, build=foreign_parts.Mixed, off=off)


@pytest.mark.slow
@pytest.mark.parametrize("made", [smooths, routes])
def test_parts_of_experts_and_of_a_vocabulary_agree(plait_ranks, made):
    report = compare(made(True), plait_ranks)
    assert report.agrees, report.text()
    assert sum(status == "ok" for status in found(report).values()) >= 8, report.text()


def test_where_backward_first_goes_wrong(plait_ranks):
    smoothed = compare(smooths(False), plait_ranks)
    assert (smoothed.backward.module, smoothed.backward.after) == ("", ""), smoothed.text()
    routed = compare(routes(False), plait_ranks)
    assert routed.backward.module == "blocks.1.experts", routed.text()
    assert routed.first.last == "blocks.1.router.weight", routed.text()
    assert routed.backward.what in routed.text()


def louder(model, mesh):
    foreign.tensor_parallel(model, mesh)
    model.blocks[1].down.register_forward_hook(lambda module, args, output: output * 1.5)
    return model


def test_where_activations_first_differ(plait_ranks):
    report = compare(comparison(louder, {"tp": 2}, off=FEW), plait_ranks)
    assert (report.forward.module, report.forward.before) == ("blocks.1.down", "blocks.1.up")
    assert report.forward.off == pytest.approx(0.5)
    assert found(report)["loss"] == "wrong"


def alone(model, mesh):
    return model


def local(model, mesh):
    """Tensor parallelism by hand: plain tensors, of which each rank holds a part."""
    group, size, rank = mesh["tp"].get_group(), mesh["tp"].size(), mesh["tp"].get_local_rank()

    for block in model.blocks:
        for linear, dim in ((block.up, 0), (block.down, 1)):
            linear.weight = nn.Parameter(linear.weight.detach().chunk(size, dim)[rank].clone())
        block.up.bias = nn.Parameter(block.up.bias.detach().chunk(size)[rank].clone())
        block.up.register_forward_pre_hook(lambda module, args: foreign_parts.Copied.apply(args[0], group))
        block.down.register_forward_hook(lambda module, args, output: foreign_parts.Summed.apply(output, group))
    shards = {"*.up.*": (0, "tp"), "*.down.weight": (1, "tp")}
    return Parallel(model, shards=shards)


@pytest.mark.slow
def test_a_mapping_of_plain_tensors(plait_ranks):
    off = {key: reason for key, reason in FEW.items() if key in ("saved", "steps")}
    report = compare(comparison(local, {"tp": 2}, off={**off, "norm": "by hand"}), plait_ranks)
    assert report.agrees, report.text()
    assert sum(status == "ok" for status in found(report).values()) == 8


def in_its_own_way(model, mesh):
    made = foreign.replicated(model, mesh)
    return Parallel(made, gradients=lambda: {n.removeprefix("module."): p.grad for n, p in made.named_parameters()})


def test_gradients_in_an_own_way_need_a_way_to_clip(plait_ranks):
    with raises_about("clip"):
        compare(comparison(in_its_own_way, {"dp": 2}, off=FEW), plait_ranks)


class Flat(nn.Module):
    """No list of modules: nothing says what to recompute."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(foreign.VOCAB, 8), nn.Linear(8, foreign.VOCAB)

    def forward(self, tokens, positions=None):
        return self.head(self.tokens(tokens))


def test_what_cannot_be_asked_is_said(plait_ranks):
    off = {key: reason for key, reason in FEW.items() if key not in ("recomputation", "frozen")}
    report = compare(comparison(foreign.replicated, {"dp": 2}, build=Flat, off=off), plait_ranks)
    assert report.agrees, report.text()
    assert found(report)["recomputation"] == "skipped"
    assert "give recompute=" in report.text()


def bent(model, mesh):
    """Two gradients are wrong, by no factor, and forward is right."""
    for weight in (model.tokens.weight, model.head.weight):
        weight.register_hook(lambda grad: grad.sign())
    return foreign.replicated(model, mesh)


def test_the_last_of_two_wrong_gradients_is_where_backward_begins_to_be(plait_ranks):
    off = {**FEW, "norm": "asked elsewhere", "unequal": "asked elsewhere"}
    report = compare(comparison(bent, {"dp": 2}, build=Flat, off=off), plait_ranks)
    assert (report.first.parameter, report.first.last) == ("tokens.weight", "head.weight"), report.text()
    assert "backward first goes wrong at head.weight" in report.text()


class Dropping(foreign.Tiny):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens, positions=None):
        return self.drop(super().forward(tokens, positions))


class Normalising(foreign.Tiny):
    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(foreign.VOCAB)

    def forward(self, tokens, positions=None):
        return self.batch(super().forward(tokens, positions).transpose(1, 2)).transpose(1, 2)


def test_rows_that_change_each_other(plait_ranks):
    report = compare(comparison(foreign.replicated, {"dp": 2}, build=Normalising, off=FEW), plait_ranks)
    assert report.first.cause.kind == "rows mix", report.text()


@pytest.mark.parametrize(
    ("about", "parallelize", "changed"),
    [
        ("build", foreign.replicated, {"build": Dropping}),
        ("batch", foreign.replicated, {"batch": random_tokens(foreign.VOCAB, rows=7, shifted=True)}),
        ("batch", foreign.replicated, {"batch": lambda step: torch.zeros(8, 3)}),
        pytest.param("parallelize", lambda model, mesh: None, {}, marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_compared_is_refused(plait_ranks, about, parallelize, changed):
    with raises_about(about):
        compare(comparison(parallelize, {"dp": 2}, **{"off": FEW, **changed}), plait_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("does", ["dies", "hangs"])
def test_a_rank_that_does_not_answer_is_named(does):
    def parallelize(model, mesh):
        if mesh.get_rank() == 1:
            os._exit(3) if does == "dies" else time.sleep(1000)
        return foreign.replicated(model, mesh)

    hangs = rf"they hang; .*rank 1 at {__file__}:\d+"
    with pytest.raises(PlaitError, match=r"the process of rank 1 died \(exit code 3\)" if does == "dies" else hangs):
        compare(comparison(parallelize, {"dp": 2}, off=FEW, patience=5.0))


def renamed(model, mesh):
    made = nn.Module()
    made.inner, made.forward = model, model.forward
    return made


def test_other_names_are_refused(plait_ranks):
    with raises_about("names"):
        compare(comparison(renamed, {"dp": 2}, off=FEW), plait_ranks)


@pytest.mark.parametrize(
    ("key", "value", "fits"),
    [
        ("mesh", {"tp": 1}, "two ranks"),
        ("mesh", {"tp": "2"}, "two ranks"),
        ("losses", "max", "'sum'"),
        ("dtype", "float16", "'bfloat16'"),
        ("rounded", foreign.in_fp8, "'bfloat16'"),
        ("off.norms", "x", ["norm"]),
        ("off.norm", "", "reason"),
        ("data", "cp", "tp"),
    ],
)
def test_what_does_not_fit_is_refused(key, value, fits):
    given = {"off": {key[4:]: value}} if key.startswith("off.") else {key: (value,) if key == "data" else value}
    about = ("dtype", "float64", fits) if key == "rounded" else (key, value, fits)
    with raises_about(*about):
        attrs.evolve(comparison(alone, {"tp": 2}), **given)
