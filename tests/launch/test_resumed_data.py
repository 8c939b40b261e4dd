"""What a run that goes on keeps of the checkpoint's batches, by table; no rank."""

from types import SimpleNamespace

import pytest

from plait.check.resumed_data import check_data, with_batch_of
from plait.checkpoint.store import Manifest
from plait.contract.errors import PlaitError
from plait.host import compose
from plait.testing import raises_about

DATA_RANKS = {"batch": 4, "sequence": 3}.get


def checked(local, indexable=True):
    config = compose(["launch.device=cpu", f"train.local_batch_size={local}"])
    return SimpleNamespace(
        config=config, layout=SimpleNamespace(count=DATA_RANKS), source=SimpleNamespace(indexable=indexable)
    )


@pytest.mark.parametrize(("size", "local", "kept"), [(24, 6, 6), (24, 4, 3), (24, 9, 6), (20, 3, 1), (8, 8, 2)])
def test_the_global_batch_is_kept_in_the_largest_local_batch_that_fits(size, local, kept):
    run, said = checked(local), []
    train = with_batch_of(Manifest(3, data={"global_batch_size": size}), run.config, 4, said.append).train
    assert (train.global_batch_size, train.local_batch_size) == (size, kept)
    assert bool(said) == (size != 4 * local)


def test_data_ranks_that_cannot_share_the_batch_are_told_what_they_can():
    with raises_about("train.global_batch_size", 18, (16, 24)):
        with_batch_of(Manifest(3, data={"global_batch_size": 18}), checked(2).config, 4, print)


def test_a_stream_goes_on_with_as_many_data_ranks_only():
    check_data(Manifest(3, data={"states": [{}] * 4}), checked(2, indexable=False))
    with pytest.raises(PlaitError, match="a stream that 3 data ranks read, but this run has 4"):
        check_data(Manifest(3, data={"states": [{}] * 3}), checked(2, indexable=False))
