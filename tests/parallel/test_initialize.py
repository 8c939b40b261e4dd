"""Initial values are a function of (seed, name, row), drawn in float32 whatever the dtype; golden values."""

import threading
import time

import pytest
import torch
from torch import nn

from plait import ModelSpec
from plait.ops import Normal, ZeroRow
from plait.parallel.initialize import initialise

SPEC = ModelSpec(axes={}, init={"*": Normal(0.02)})
# seed 0, "weight", the first two elements of rows 0 and 1: a change makes every run of every user another run
GOLDEN = [[-0.037779711186885834, -0.024598240852355957], [0.002404827158898115, -0.0181113313883543]]


def drawn(seed=0, dtype=torch.float32, name="weight", shape=(3, 20)):
    model = nn.Module()
    model.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))
    initialise(model, SPEC, seed)
    return getattr(model, name).detach()


def test_golden_values():
    assert drawn()[:2, :2].tolist() == GOLDEN


def test_seed_name_and_row_make_other_values():
    first = drawn()
    assert not torch.equal(first, drawn(seed=1))
    assert not torch.equal(first, drawn(name="other"))
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first, drawn())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 20), (3, 5), (7,)])
def test_values_are_those_of_float32_cast(dtype, shape):
    assert torch.equal(drawn(dtype=dtype, shape=shape), drawn(shape=shape).to(dtype))


def test_threads_draw_the_same_values_beside_each_other(monkeypatch):
    """Rows are in threads of their own; with one thread, one after the other."""
    threads = set()

    def fill(row, generator):
        threads.add(threading.get_ident())
        time.sleep(0.001)
        row.normal_(generator=generator)

    spec = ModelSpec(axes={}, init={"*": fill})
    found = []
    for number in (1, 4):
        threads.clear()
        monkeypatch.setattr(torch, "get_num_threads", lambda number=number: number)
        model = nn.Module()
        model.register_parameter("weight", nn.Parameter(torch.empty(300, 5000)))
        initialise(model, spec, 0)
        found.append((model.weight.detach(), len(threads)))
    assert torch.equal(found[0][0], found[1][0])
    assert [number for _, number in found] == [1, 4]


def test_a_row_knows_its_index():
    model = nn.Embedding(5, 3)
    initialise(model, ModelSpec(axes={}, init={"weight": ZeroRow(Normal(0.02), 2)}), 0)
    plain = drawn(shape=(5, 3))
    plain[2] = 0.0
    assert torch.equal(model.weight, plain)


def test_buffers_are_filled_whole_in_their_own_dtype():
    """Numbers that float32 cannot hold."""
    model, wide, whole = nn.Module(), torch.arange(6, dtype=torch.float64).view(2, 3) / 3, torch.tensor([2**24 + 1, 3])
    model.register_buffer("table", torch.empty_like(wide))
    model.register_buffer("index", torch.empty_like(whole))
    init = {"table": lambda tensor, generator: tensor.copy_(wide), "index": lambda tensor, _: tensor.copy_(whole)}
    initialise(model, ModelSpec(axes={}, init=init), 0)
    assert torch.equal(model.table, wide)
    assert torch.equal(model.index, whole)
