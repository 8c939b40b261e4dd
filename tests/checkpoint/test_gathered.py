"""An export of tensors that only other ranks than the writer have: each comes from its owner, whoever sends first."""

import time

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from plait.checkpoint import export as module

OWNERS = {"a": 2, "b": 1}
SIZE = 3


def exported(folder):
    rank, whole = dist.get_rank(), module._whole
    state = {name: torch.full((SIZE,), float(owner)) for name, owner in OWNERS.items() if owner == rank}

    def late(tensor):  # the owner of the first tensor, while that of the second waits to be asked
        time.sleep(0.3)
        return whole(tensor)

    module._whole = late if rank == OWNERS["a"] else whole
    try:
        module.export(state, folder, is_writer=rank == 0, known=tuple(OWNERS))
    finally:
        module._whole = whole


def test_each_tensor_comes_from_the_rank_that_has_it(plait_ranks, tmp_path):
    plait_ranks.run(exported, tmp_path / "out", world=3)
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in held.items()} == {
        name: [float(owner)] * SIZE for name, owner in OWNERS.items()
    }
