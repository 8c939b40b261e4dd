"""Axes of several strategies become one layout, or an error that names them all."""

import pytest

from plait.contract.axes import MeshAxis, MeshView, join_axes
from plait.testing import raises_about

DATA = ("data", [MeshAxis("replicate", 2, "batch"), MeshAxis("shard", -1, "batch")])
TENSOR = ("tensor", [MeshAxis("tp", 2, shards=("heads", "ffn"))])
STAGES = ("stages", [MeshAxis("pp", 2, "layers")])


def degrees(axes):
    return {a.name: a.degree for a in axes}


def test_minus_one_takes_what_is_left_and_order_follows_what_is_split():
    layout = join_axes([TENSOR, DATA, STAGES, ("context", [MeshAxis("cp", 2, "sequence")])], 32)
    assert list(degrees(layout.dense).items()) == [("pp", 2), ("replicate", 2), ("shard", 2), ("cp", 2), ("tp", 2)]
    assert [a.name for a in layout.data_axes()] == ["replicate", "shard", "cp"]
    assert (layout.count("batch"), layout.count("sequence"), layout.count("layers")) == (4, 2, 2)


def test_no_axes_is_one_rank():
    assert join_axes([], 1).dense == ()
    with raises_about("world", 2, "exactly 1"):
        join_axes([], 2)


@pytest.mark.parametrize(
    ("answers", "world", "about", "names"),
    [
        ([DATA, TENSOR], 6, ("world", 6, "a multiple of 4"), "replicate=2 (data), shard=-1"),
        ([TENSOR], 3, ("world", 3, "exactly 2"), "tp=2 (tensor)"),
        ([DATA, ("more", [MeshAxis("rest", -1, "batch")])], 4, ("rest", -1), "rest=-1 (more)"),
        ([TENSOR, ("twin", [MeshAxis("tp", 2)])], 4, ("tp", ("tensor", "twin")), "tensor and by twin"),
        ([("zero", [MeshAxis("z", 0)])], 4, ("z", 0, "at least 1"), "(zero)"),
    ],
)
def test_what_does_not_fit_names_axes_degrees_and_who_asked(answers, world, about, names):
    with raises_about(*about) as caught:
        join_axes(answers, world)
    assert names in str(caught.value)


@pytest.mark.parametrize(
    ("degree", "rest"),
    [
        (2, {"e.replicate": 2, "e.shard": 4, "e.tp": 1}),
        (4, {"e.replicate": 2, "e.shard": 2, "e.tp": 1}),
        (16, {"e.replicate": 1, "e.shard": 1, "e.tp": 1}),
    ],
)
def test_a_view_is_carved_from_the_innermost_axes(degree, rest):
    layout = join_axes([DATA, TENSOR, ("experts", [MeshView("e", [MeshAxis("ep", degree, shards=("experts",))])])], 16)
    assert degrees(layout.views["e"]) == {**rest, "ep": degree}
    assert {a.name for a in layout.data_axes("e")} == set(rest)


def test_a_view_that_does_not_fit_says_which_degrees_would():
    with raises_about("ep", 3, (1, 2, 4, 8, 16)):
        join_axes([DATA, TENSOR, ("experts", [MeshView("e", [MeshAxis("ep", 3)])])], 16)


def test_a_view_is_never_carved_from_layers():
    answers = [STAGES, TENSOR, ("experts", [MeshView("e", [MeshAxis("ep", 4)])])]
    with raises_about("ep", 4, (1, 2)) as caught:
        join_axes(answers, 4)
    assert caught.value.fits == (1, 2)


def test_splits_are_checked():
    with pytest.raises(ValueError, match="splits"):
        MeshAxis("x", 2, splits="tokens")


WORKERS = ("workers", [MeshAxis("worker", 2, "batch", sums=False)])


def test_an_axis_that_does_not_sum_splits_the_batch_and_lies_outside():
    layout = join_axes([DATA, TENSOR, WORKERS], 16)
    assert [a.name for a in layout.dense] == ["worker", "replicate", "shard", "tp"]
    assert [a.name for a in layout.data_axes()] == ["replicate", "shard"]
    assert layout.count("batch") == 8


def test_no_view_is_carved_out_of_an_axis_that_does_not_sum():
    view = MeshView("e", [MeshAxis("ep", 8, shards=("experts",))])
    layout = join_axes([DATA, TENSOR, WORKERS, ("experts", [view])], 16)
    assert degrees(layout.views["e"]) == {"e.worker": 2, "e.replicate": 1, "e.shard": 1, "e.tp": 1, "ep": 8}
    assert [a.name for a in layout.data_axes("e")] == ["e.replicate", "e.shard", "e.tp"]
    with raises_about("ep", 16) as caught:
        join_axes([DATA, TENSOR, WORKERS, ("experts", [MeshView("e", [MeshAxis("ep", 16)])])], 16)
    assert caught.value.fits == (1, 2, 4, 8)


def test_nor_across_one_that_lies_between():
    """Sequence ranks that keep their gradients apart, inside the batch: what is further out stays out of reach."""
    apart = ("apart", [MeshAxis("apart", 2, "sequence", sums=False)])
    with raises_about("ep", 4) as caught:
        join_axes([DATA, TENSOR, apart, ("experts", [MeshView("e", [MeshAxis("ep", 4)])])], 16)
    assert caught.value.fits == (1, 2)


@pytest.mark.parametrize("splits", ["layers", None])
def test_only_who_splits_tokens_may_leave_out_the_sum(splits):
    with pytest.raises(ValueError, match="sums=False is for axes that split the batch or the sequence; 'x' does not"):
        MeshAxis("x", 2, splits, sums=False)
