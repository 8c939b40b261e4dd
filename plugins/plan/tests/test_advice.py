"""What is suggested fits when it is planned, and the smaller change before it does not."""

import re
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from plait.host import check, compose
from plait_plan import advice
from plait_plan.advice import Advice, advise
from plait_plan.engine import plan, plannable
from plait_plan.job import Request, key_of
from plait_plan.values import Plan

TINY = [
    *("cluster=h100", "model.dim=128", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=1"),
    *("model.ffn_dim=256", "train.seq_len=64", "train.local_batch_size=8", "validation.interval=0"),
]
FSDP2 = "strategy.fsdp2"
STRONGEST = ["remat.mode=full", "train.local_batch_size=1", "precision.param=bfloat16"]


def planned(run: list[str], world: int, *more: str) -> Plan:
    """With what `more` changes, which may be the world."""
    given = {key_of(text): text for text in [*run, *more]}
    world = int(given.pop("world", f"world={world}").partition("=")[2])
    return plan(compose(list(given.values())), world)


def with_room(run: list[str], world: int, *more: str) -> list[str]:
    """The run, on machines that have room for just what it needs with `more`."""
    return [*run, f"cluster.reserved={80_000_000_000 - planned(run, world, *more).memory.peak}"]


def advised(run: list[str], world: int) -> Advice:
    return advise(Request(run, world), planned(run, world))


GIB = 2**30


@pytest.mark.parametrize(
    ("room", "fitting"),
    [
        (33, ["remat.mode=selective", "train.local_batch_size=4 train.global_batch_size=16", "world=16 (128)"]),
        (25, ["remat.mode=full", "train.local_batch_size=4 train.global_batch_size=16"]),
        (16, ["train.local_batch_size=2 train.global_batch_size=16"]),
        (9, ["remat.mode=full train.local_batch_size=1 train.global_batch_size=16"]),
        (7, ["remat.mode=full train.local_batch_size=1 world=3 (3)"]),
        (
            4.85,
            ["remat.mode=full train.local_batch_size=1 precision.param=bfloat16 world=4 train.global_batch_size=16"],
        ),
    ],
)
def test_the_least_change_of_each_kind_or_all_of_them(
    monkeypatch: pytest.MonkeyPatch, room: float, fitting: list[str]
) -> None:
    """Of a rank that needs 12 / world GiB of state, and 4 of activations for each sample. In parentheses: the samples
    of a step, if they are others than the 16 of now."""
    base = plan(compose(["strategy=[fsdp2]", *TINY]), 2)

    def arithmetic(request: Request) -> Plan:
        keys = {key_of(text): text.partition("=")[2] for text in request.overrides}
        share = {"none": 1.0, "selective": 0.8, "full": 0.5}[keys.get("remat.mode", "none")]
        share *= 0.9 if "precision.param" in keys else 1
        world = request.world or 1
        rows = int(keys["train.local_batch_size"])
        samples = int(keys.get("train.global_batch_size", rows * world))
        assert samples % (rows * world) == 0
        left = int(room * GIB - (12 / world + 4 * rows * share) * GIB)
        return attrs.evolve(base, world=world, tokens=64 * samples, free=left, fits=left >= 0, capacity=room * GIB)

    monkeypatch.setattr(Request, "plan", arithmetic)
    monkeypatch.setattr(advice, "_shardings", lambda config, checked: [])
    request = Request(["strategy=[fsdp2]", *TINY], 2)
    found = [job for job in advise(request, request.plan()).jobs if job.fits]
    told = [re.sub("a step has (.*) samples, not 16", r"(\1)", job.note) for job in found]
    assert [f"{job.label} {samples}".strip() for job, samples in zip(found, told, strict=True)] == fitting


@pytest.mark.parametrize(("together", "smaller"), [(1, [6, 4, 3, 2, 1]), (2, [6, 4, 2]), (3, [6, 3]), (12, [])])
def test_no_smaller_batch_parts_the_rows_that_a_loss_compares(together: int, smaller: list[int]) -> None:
    now: Any = SimpleNamespace(assumed={"train.local_batch_size": 12, "train.global_batch_size": 24})
    assert advice._batches(now, together) == [{"train.local_batch_size": n} for n in smaller]


@pytest.mark.parametrize(
    ("listed", "left"),
    [("[fsdp2]", []), ("[zero,fsdp2]", ["++strategy.zero.stage=1"]), ("[]", [])],
)
def test_options_of_a_strategy_go_with_it(listed: str, left: list[str]) -> None:
    given = Request(["strategy=[zero]", "++strategy.zero.stage=1", "strategy.zero_more.x=1", "train.steps=2"])
    assert given.changed({"strategy": listed}).overrides == [*left, "train.steps=2", f"strategy={listed}"]
    assert given.changed({"train.steps": 3}).overrides == [*given.overrides[:3], "train.steps=3"]


@pytest.mark.parametrize(
    ("world", "run", "first", "more"),
    [
        (1, ["strategy=[]"], {"strategy": "[fsdp2]"}, None),
        (4, ["strategy=[ddp]"], {"strategy": "[fsdp2]"}, "[tensor_parallel,ddp]"),
        (4, ["strategy=[fsdp2]", f"{FSDP2}.replicate=2"], {f"{FSDP2}.replicate": 1}, "[tensor_parallel,fsdp2]"),
        (4, ["strategy=[fsdp2]", f"{FSDP2}.shard=4"], {f"{FSDP2}.shard": -1}, "[tensor_parallel,fsdp2]"),
        (2, ["strategy=[tensor_parallel]"], {"strategy": "[tensor_parallel,fsdp2]"}, None),
    ],
)  # fmt: skip
def test_a_run_may_share_more_by_its_own_strategies_and_by_others(
    world: int, run: list[str], first: dict[str, Any], more: str | None
) -> None:
    """In place of copies first; then beside what it has, by as many ranks as there are key-value heads to divide."""
    config = plannable(compose([*TINY, "model.n_heads=4", "model.n_kv_heads=4", *run]), [])
    found = advice._shardings(config, check(config, world))
    assert found[0] == [first]
    beside = [[(c["strategy"], c["strategy.tensor_parallel.degree"]) for c in changes]
              for changes in found if "strategy.tensor_parallel.degree" in changes[0]]  # fmt: skip
    assert beside == ([[(more, 2), (more, 4)]] if more else [])


@pytest.mark.slow
def test_a_suggestion_is_the_least_of_its_kind_that_fits() -> None:
    run = with_room(["strategy=[fsdp2]", *TINY], 2, "train.local_batch_size=2", "train.global_batch_size=16")
    jobs = {job.label: job for job in advised(run, 2).jobs}
    assert list(jobs)[:2] == ["remat.mode=full", "train.local_batch_size=2 train.global_batch_size=16"]
    for label, job in jobs.items():
        assert planned(run, 2, *label.split()).fits is job.fits, label
    before = ["train.local_batch_size=4", "train.global_batch_size=16"]
    assert planned(run, 2, *before).fits is False


@pytest.mark.slow
def test_kinds_go_together_if_none_suffices() -> None:
    run = with_room(["strategy=[fsdp2]", *TINY], 6, *STRONGEST)
    last = advised(run, 2).jobs[-1]
    assert last.label.split() == [*STRONGEST, "world=6"]
    fits = [planned(run, 2, *STRONGEST, f"world={world}").fits for world in (6, 5)]
    assert fits == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["strategy=[]", "strategy=[ddp]"])
def test_a_run_that_copies_all_is_told_to_share(strategy: str) -> None:
    world = 1 if strategy == "strategy=[]" else 2
    run = with_room([strategy, *TINY], world, "strategy=[fsdp2]", "world=6")
    fitting = [job for job in advised(run, world).jobs if job.fits]
    labels = [job.label for job in fitting if "world=" in job.label]
    assert any(label.startswith("strategy=[fsdp2]") for label in labels)
    assert all(planned(run, world, *job.label.split()).fits for job in fitting)


@pytest.mark.slow
def test_copies_are_given_up_before_more_machines() -> None:
    run = ["strategy=[fsdp2]", "strategy.fsdp2.replicate=2", *TINY]
    run = with_room(run, 4, "strategy.fsdp2.replicate=1")
    assert "strategy.fsdp2.replicate=1" in [job.label for job in advised(run, 4).jobs if job.fits]


@pytest.mark.slow
def test_state_that_is_too_much_alone_leaves_out_what_cannot_help() -> None:
    run = ["strategy=[fsdp2]", *TINY, "cluster.reserved=79.999e9"]  # leaves 1 MB
    found = advised(run, 2)
    assert found.state is not None
    assert found.state > 1_000_000
    assert not any(job.label.startswith(("remat", "precision")) and "world" not in job.label for job in found.jobs)
    assert "Parameters and optimizer alone take" in found.text()
