"""Axes of several strategies become one layout, or an error that names them all."""

import pytest

from plait.contract.axes import MeshAxis, MeshView, assemble
from plait.contract.errors import PlaitError

DATA = ("data", [MeshAxis("replicate", 2, "batch"), MeshAxis("shard", -1, "batch")])
TENSOR = ("tensor", [MeshAxis("tp", 2, shards=("heads", "ffn"))])
STAGES = ("stages", [MeshAxis("pp", 2, "layers")])


def degrees(axes):
    return {a.name: a.degree for a in axes}


def test_minus_one_takes_what_is_left_and_order_follows_what_is_split():
    layout = assemble([TENSOR, DATA, STAGES, ("context", [MeshAxis("cp", 2, "sequence")])], 32)
    assert list(degrees(layout.dense).items()) == [("pp", 2), ("replicate", 2), ("shard", 2), ("cp", 2), ("tp", 2)]
    assert [a.name for a in layout.data_axes()] == ["replicate", "shard", "cp"]
    assert (layout.count("batch"), layout.count("sequence"), layout.count("layers")) == (4, 2, 2)


def test_no_axes_is_one_rank():
    assert assemble([], 1).dense == ()
    with pytest.raises(PlaitError, match=r"does not fit 2 ranks: it needs exactly 1; no selected strategy has an axis"):
        assemble([], 2)


@pytest.mark.parametrize(
    ("answers", "world", "message"),
    [
        ([DATA, TENSOR], 6, r"does not fit 6 ranks: it needs a multiple of 4; axes: replicate=2 \(data\), shard=-1"),
        ([TENSOR], 3, r"does not fit 3 ranks: it needs exactly 2; axes: tp=2 \(tensor\)"),
        ([DATA, ("more", [MeshAxis("rest", -1, "batch")])], 4, "only one axis may take what is left"),
        ([TENSOR, ("twin", [MeshAxis("tp", 2)])], 4, "'tp' is defined twice: by tensor and by twin"),
        ([("zero", [MeshAxis("z", 0)])], 4, r"the degree of axis 'z' \(zero\) is 0"),
    ],
)
def test_what_does_not_fit_names_axes_degrees_and_who_asked(answers, world, message):
    with pytest.raises(PlaitError, match=message):
        assemble(answers, world)


@pytest.mark.parametrize(
    ("degree", "rest"),
    [
        (2, {"e.replicate": 2, "e.shard": 4, "e.tp": 1}),
        (4, {"e.replicate": 2, "e.shard": 2, "e.tp": 1}),
        (16, {"e.replicate": 1, "e.shard": 1, "e.tp": 1}),
    ],
)
def test_a_view_is_carved_from_the_innermost_axes(degree, rest):
    layout = assemble([DATA, TENSOR, ("experts", [MeshView("e", [MeshAxis("ep", degree, shards=("experts",))])])], 16)
    assert degrees(layout.views["e"]) == {**rest, "ep": degree}
    assert {a.name for a in layout.data_axes("e")} == set(rest)


def test_a_view_that_does_not_fit_says_which_degrees_would():
    with pytest.raises(PlaitError, match=r"ep=3 \(experts\) asks for 3 of .*degrees that fit these: 1, 2, 4, 8, 16$"):
        assemble([DATA, TENSOR, ("experts", [MeshView("e", [MeshAxis("ep", 3)])])], 16)


def test_a_view_is_never_carved_from_layers():
    answers = [STAGES, TENSOR, ("experts", [MeshView("e", [MeshAxis("ep", 4)])])]
    with pytest.raises(PlaitError, match=r"degrees that fit these: 1, 2$"):
        assemble(answers, 4)


def test_splits_are_checked():
    with pytest.raises(ValueError, match="splits"):
        MeshAxis("x", 2, splits="tokens")


WORKERS = ("workers", [MeshAxis("worker", 2, "batch", sums=False)])


def test_an_axis_that_does_not_sum_splits_the_batch_and_lies_outside():
    layout = assemble([DATA, TENSOR, WORKERS], 16)
    assert [a.name for a in layout.dense] == ["worker", "replicate", "shard", "tp"]
    assert [a.name for a in layout.data_axes()] == ["replicate", "shard"]
    assert layout.count("batch") == 8


def test_no_view_is_carved_out_of_an_axis_that_does_not_sum():
    view = MeshView("e", [MeshAxis("ep", 8, shards=("experts",))])
    layout = assemble([DATA, TENSOR, WORKERS, ("experts", [view])], 16)
    assert degrees(layout.views["e"]) == {"e.worker": 2, "e.replicate": 1, "e.shard": 1, "e.tp": 1, "ep": 8}
    assert [a.name for a in layout.data_axes("e")] == ["e.replicate", "e.shard", "e.tp"]
    with pytest.raises(PlaitError, match=r"degrees that fit these: 1, 2, 4, 8$"):
        assemble([DATA, TENSOR, WORKERS, ("experts", [MeshView("e", [MeshAxis("ep", 16)])])], 16)


def test_nor_across_one_that_lies_between():
    """Sequence ranks that keep their gradients apart, inside the batch: what is further out stays out of reach."""
    apart = ("apart", [MeshAxis("apart", 2, "sequence", sums=False)])
    with pytest.raises(PlaitError, match=r"degrees that fit these: 1, 2$"):
        assemble([DATA, TENSOR, apart, ("experts", [MeshView("e", [MeshAxis("ep", 4)])])], 16)


@pytest.mark.parametrize("splits", ["layers", None])
def test_only_who_splits_tokens_may_leave_out_the_sum(splits):
    with pytest.raises(ValueError, match="sums=False is for axes that split the batch or the sequence; 'x' does not"):
        MeshAxis("x", 2, splits, sums=False)
