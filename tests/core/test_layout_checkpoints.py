"""A checkpoint carries no strategy: what one layout saves any other loads, bit by bit, optimizer and all."""

import pytest
import torch
from layouts import batch, full, llama, same

import plait
from plait.checkpoint.load import load
from plait.checkpoint.save import Saver
from plait.checkpoint.store import Store
from plait.plugins import create

LAYOUTS = {
    "one process": (1, {}),
    "fsdp 1": (1, {"fsdp2": {}}),
    "fsdp 2": (2, {"fsdp2": {}}),
    "fsdp 4": (4, {"fsdp2": {}}),
    "hsdp 2x2": (4, {"fsdp2": {"replicate": 2}}),
}


def ready(strategies, seed):
    model = llama(tie_embeddings=True)
    applied = plait.apply(model, model.spec(), [create(n, o) for n, o in strategies.items()], seed=seed)
    return applied, torch.optim.AdamW(applied.parameters(), lr=1e-2)


def step(applied, optimizer, number):
    tokens, labels = batch(number)
    index, count = applied.mesh.share("batch")
    mine = slice(index * len(tokens) // count, (index + 1) * len(tokens) // count)
    plait.cross_entropy_sum(applied.parts[0](tokens[mine]), labels[mine]).backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(applied, optimizer):
    return {key: full(tensor) for key, tensor in applied.checkpoint(optimizer)[0].items()}


def save(strategies, folder):
    applied, optimizer = ready(strategies, seed=0)
    step(applied, optimizer, 0)
    saver = Saver(Store(folder), "async")
    saver.save(applied.checkpoint(optimizer)[0], 1)
    state = everything(applied, optimizer)
    step(applied, optimizer, 1)  # goes on while the thread writes
    saver.wait()
    return state


def restore(strategies, folder):
    applied, optimizer = ready(strategies, seed=1)
    load(Store(folder).latest(), *applied.checkpoint(optimizer))
    return everything(applied, optimizer)


@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_layout_loads_what_another_saved(pool, tmp_path, saved):
    world, strategies = LAYOUTS[saved]
    state = pool.run(save, strategies, tmp_path, world=world)[0]
    assert "model.output.weight" not in state  # tied: saved once, under its first name
    assert "optimizer.tok_embeddings.weight.exp_avg" in state
    for loaded, (ranks, other) in LAYOUTS.items():
        for rank, answer in enumerate(pool.run(restore, other, tmp_path, world=ranks)):
            assert same(answer, state), f"{saved} -> {loaded}, rank {rank}"
