"""A save begins on all ranks together: none makes its folder while rank 0 still removes an earlier attempt."""

import time
from unittest import mock

import torch
import torch.distributed as dist

from plait.checkpoint import save
from plait.checkpoint.store import Store


def begin(folder):
    """Whether the folder was there, at the end of a long removal, on rank 0."""
    seen, make_room = [], Store.make_room

    def slow(store, step):
        make_room(store, step)
        time.sleep(0.5)
        seen.append(store.temporary(step).exists())

    with mock.patch.object(Store, "make_room", slow):
        save.Saver(Store(folder), "sync").save({"weight": torch.full((4,), float(dist.get_rank()))}, 3)
    return seen


def test_no_rank_makes_what_another_still_removes(plait_ranks, tmp_path):
    stale = tmp_path / "step-3.tmp"
    stale.mkdir()
    (stale / "left").write_text("of a killed run")
    assert plait_ranks.run(begin, tmp_path, world=2) == [[False], []]
    assert not (tmp_path / "step-3" / "left").exists()
