"""Days and dollars of so many tokens are hand arithmetic on the time of a step."""

from types import SimpleNamespace
from typing import Any

import pytest

from plait.host import compose
from plait_plan.cost import cost_of
from plait_plan.engine import plan
from plait_plan.job import Request
from plait_plan.verdict import verdict

TINY = [
    *("strategy=[fsdp2]", "cluster=h100", "model.dim=32", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=1"),
    *("model.ffn_dim=64", "train.seq_len=32", "train.local_batch_size=2", "validation.interval=0"),
]


def test_a_thousand_million_tokens_on_sixteen_ranks() -> None:
    planned: Any = SimpleNamespace(time=SimpleNamespace(tokens_per_second=(1000.0, 4000.0)), world=16)
    found: Any = cost_of(planned, 86.4e9, 2.5)
    assert found.days == (250.0, 1000.0)
    assert found.dollars == (250 * 24 * 16 * 2.5, 1000 * 24 * 16 * 2.5)
    free: Any = cost_of(planned, 86.4e9, None)
    assert (free.days, free.dollars) == (found.days, None)
    assert cost_of(planned, None, None) is None
    untimed: Any = SimpleNamespace(time=None, world=16)
    assert cost_of(untimed, 1e9, 2.5) is None


@pytest.mark.parametrize(
    ("overrides", "price"),
    [(["cluster=h100"], 2.0), (["cluster=cpu", "cluster=h200"], 3.0), (["cluster=mine"], 4.0), ([], 4.0)],
)
def test_a_price_is_of_the_machines_that_are_named(overrides: list[str], price: float) -> None:
    planned: Any = SimpleNamespace(time=SimpleNamespace(tokens_per_second=(1.0, 1.0)), world=1)
    found: Any = Request(overrides, tokens=3600.0, prices={"h100": 2.0, "h200": 3.0, "": 4.0}).cost(planned)
    assert found.dollars == (price, price)


def test_the_verdict_says_all_that_decides() -> None:
    planned = plan(compose(TINY), 16)
    cost = cost_of(planned, 1e9, 2.5)
    lines = {line[:10].strip(): line[10:].strip() for line in verdict(planned, cost)}
    assert list(lines) == ["verdict", "step", "tokens", "1e9 tokens", "assumed", ""]
    assert lines["verdict"].startswith("fits on NVIDIA H100 SXM: ")
    assert "$2.5 an hour each" in lines["1e9 tokens"]
    for said in ("precision.param=float32", "remat.mode=none", "train.seq_len=32", "train.local_batch_size=2"):
        assert said in lines["assumed"] + lines[""]
