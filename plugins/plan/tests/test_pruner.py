"""Why a job of a sweep is not tried, as its plan tells; the figures of one that is."""

from types import SimpleNamespace
from typing import Any

import pytest

from plait_plan import engine
from plait_plan.pruner import cannot_work


def checked(composes: bool = True) -> tuple[Any, dict[str, Any]]:
    """(a run of two ranks, what it reports)."""
    reported: dict[str, Any] = {}

    def apply(fill: bool) -> None:
        assert not fill
        if not composes:
            raise ValueError("no such\nlayer")

    assembly = SimpleNamespace(run=SimpleNamespace(report=reported.__setitem__))
    layout = SimpleNamespace(world_size=2)
    return SimpleNamespace(config="the config", layout=layout, apply=apply, assembly=assembly), reported


@pytest.mark.parametrize(
    ("capacity", "fits", "reason"),
    [
        (None, None, ""),  # without a cluster
        (3 * 2**30, True, ""),
        (2**30, False, "does not fit cluster=small: it needs 2.00 GiB per rank, and 1.00 GiB can be used"),
    ],
)
def test_a_job_that_does_not_fit_says_so_and_each_reports_its_figures(
    capacity: int | None, fits: bool | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = SimpleNamespace(tokens_per_second=(5.0, 7.0)) if capacity else None
    memory = SimpleNamespace(peak=2 * 2**30)
    found = SimpleNamespace(time=time, memory=memory, capacity=capacity, fits=fits, cluster="small")
    monkeypatch.setattr(engine, "plan", lambda *run: {("the config", 2): found}[run])
    run, reported = checked()
    assert cannot_work(run) == reason
    speed = [5.0, 7.0] if capacity else None
    assert reported == {"sweep": {"planned_memory_bytes": 2 * 2**30, "planned_tokens_per_second": speed}}


@pytest.mark.parametrize(("composes", "reason"), [(True, ""), (False, "no such layer")])
def test_a_job_without_a_plan_is_tried_if_it_composes(
    composes: bool, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*run: Any) -> None:
        raise ValueError("not traceable")

    monkeypatch.setattr(engine, "plan", refuse)
    run, reported = checked(composes)
    assert reason in cannot_work(run)
    assert bool(cannot_work(run)) is not composes
    assert ("this job cannot be planned, and is tried: " in capsys.readouterr().out) is composes
    assert reported == {}
