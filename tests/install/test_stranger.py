"""A strategy that the core has never heard of, not even installed: its instance is handed to `plait.apply`."""

import sys
from pathlib import Path

import pytest
from layouts import llama, run_layout, same, worst_gradient
from toys import ToyTensor

sys.path.insert(0, str(Path(__file__).parent / "stranger" / "src"))  # the pool's ranks inherit it

from plait_twin import Twin

STEPS = 20


def tied():
    return llama(tie_embeddings=True)


@pytest.fixture(scope="module")
def references(pool):
    return {make: pool.run(run_layout, {}, steps=STEPS, make=make, world=1)[0] for make in (llama, tied)}


@pytest.mark.parametrize(
    ("world", "extra", "make", "options"),
    [
        (2, [Twin()], llama, {}),
        (4, [Twin(4)], llama, {}),
        (2, [Twin()], tied, {}),
        (2, [Twin()], llama, {"micro": 2, "remat": "full"}),
        (2, [Twin()], tied, {"micro": 2, "remat": "selective"}),
        (2, [Twin()], llama, {"compiled": "aot_eager"}),
        (4, [ToyTensor(), Twin()], llama, {}),
    ],
    ids=["2", "4", "tied", "accumulated and recomputed", "tied, both", "compiled", "beside tensor ranks"],
)
def test_parity(pool, references, world, extra, make, options):
    reference = references[make]
    for trace in pool.run(run_layout, {}, steps=STEPS, extra=tuple(extra), make=make, world=world, **options):
        assert same(trace.initial, reference.initial)
        error, name = worst_gradient(trace, reference)
        assert error < 1e-10, name
        assert max(abs(a - b) for a, b in zip(trace.losses, reference.losses, strict=True)) < 1e-9
        assert max(abs(a / b - 1) for a, b in zip(trace.norms, reference.norms, strict=True)) < 1e-9
