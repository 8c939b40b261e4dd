"""The value that is named fits, and the next one does not."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from plait import PlaitError
from plait.host import compose, text
from plait_plan.engine import plan
from plait_plan.job import Request
from plait_plan.limits import found, limit

TINY = [
    *("strategy=[fsdp2]", "cluster=h100", "model.dim=128", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=1"),
    *("model.ffn_dim=256", "train.seq_len=16", "train.local_batch_size=1", "validation.interval=0"),
]


def with_room(bytes_: int) -> list[str]:
    """TINY on machines with room for so much."""
    return [*TINY, f"cluster.reserved={80_000_000_000 - bytes_}"]


@pytest.mark.slow
@pytest.mark.parametrize(("more", "before"), [([], 5), (["strategy.fsdp2.replicate=2"], 4)])
def test_one_rank_less_than_the_smallest_world_is_too_few(more: list[str], before: int) -> None:
    run = [*with_room(plan(compose([*TINY, *more]), 6).memory.peak), *more]
    reached = limit(Request(run), "world", largest=False)
    assert reached.beyond is not None
    assert (reached.value, reached.beyond[0]) == (6, before)
    assert [plan(compose(run), world).fits for world in (6, before)] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["seq_len", "train.local_batch_size"])
def test_one_more_than_the_largest_is_too_much(key: str) -> None:
    run = with_room(plan(compose(TINY), 1).memory.peak + 50_000)
    reached = limit(Request(run, 1), key, largest=True)
    full = f"train.{key.removeprefix('train.')}"
    assert reached.key == full
    fits = [plan(compose([*run, f"{full}={value}"]), 1).fits for value in (reached.value, reached.value + 1)]
    assert fits == [True, False]
    assert f"{full}={reached.value} is the largest that fits; with {full}={reached.value + 1} " in reached.text()


@pytest.mark.parametrize(
    ("start", "can_be", "largest", "said"),
    [
        (8, lambda n: n % 4 == 0, True, "=16 is the largest that fits; with KEY=20 3 B are too much"),
        (8, lambda n: 1000 % n == 0 and n < 11, True, "=10 is the largest found that fits; values up to "),
        (
            300,
            lambda n: n in (1, 200, 300),
            True,
            "=1 is the largest found that fits; with KEY=300 283 B are too much; not",
        ),
        (32, lambda n: n % 4 == 0, False, "=20 is the smallest that fits; with KEY=16 1 B are too much"),
        (40, lambda n: n > 30, False, "=31 is the smallest that fits, and no smaller one is possible"),
        (1000, lambda n: n > 900, False, "=1000 is the smallest found that fits; values down to 1 were tried, but not"),
    ],
)
def test_it_claims_no_more_than_was_tried(
    monkeypatch: pytest.MonkeyPatch, start: int, can_be: Any, largest: bool, said: str
) -> None:
    """Of runs whose edge is at 17."""

    def arithmetic(request: Request) -> Any:
        value = int(request.overrides[-1].partition("=")[2])
        if not can_be(value):
            raise PlaitError(f"{value} cannot be")
        return SimpleNamespace(free=17 - value if largest else value - 17)

    monkeypatch.setattr(Request, "plan", arithmetic)
    key = "train.local_batch_size"
    told: list[str] = []
    reached = limit(Request([*TINY, f"{key}={start}"]), key, largest, to=told.append)
    assert f"plan: {key}={reached.value}: {text.size(abs(17 - reached.value))} are left" in told
    answer = reached.text().replace(key, "KEY")
    assert answer.startswith(f"KEY{said}")
    refused = re.search(r"; with KEY=(\d+): (\d+) cannot be$", answer)
    if "values" in said:  # the reason of the nearest one beyond
        assert refused is not None
        assert refused[1] == refused[2]
        assert (int(refused[1]) > reached.value) == largest
    else:
        assert refused is None


@pytest.mark.slow
def test_what_no_world_can_hold_is_said() -> None:
    run = [*TINY, "cluster.reserved=79.9999e9"]  # leaves 100 kB
    with pytest.raises(PlaitError, match=r"no world fits on NVIDIA H100 SXM: with world=[0-9]+ .* are too much"):
        limit(Request(run), "world", largest=False)
    refused: Any = found(Request(run), "a=1", "world", False)
    assert (refused.label, refused.plan) == ("a=1", None)
    assert "no world fits" in refused.why
