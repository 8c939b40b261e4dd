"""Plans and pieces are kept for a process's next question, and never serve another one."""

import functools
from pathlib import Path

import attrs
import pytest

from plait import PlaitError, planning
from plait.contract.axes import MeshLayout
from plait.contract.config import Config
from plait.host import check, compose
from plait_plan import engine
from plait_plan.engine import plan
from plait_plan.memo import Memo
from plait_plan.pricing import traces
from plait_plan.pricing.pieces import depends_on
from plait_plan.pricing.space import representatives
from plait_plan.tracing import kept

SMALL = ["train.local_batch_size=2", "train.seq_len=32", "validation.interval=0", "model.vocab_size=8192"]
CHUNKS = "loss.chunks=8"


@pytest.mark.slow
def test_plans_differ_by_chunks_of_the_loss() -> None:
    whole, chunked, again = (plan(compose([*SMALL, *more]), 1).memory for more in ([], [CHUNKS], []))
    assert chunked.logits < whole.logits == again.logits


def test_pieces_differ_by_chunks_of_the_loss() -> None:
    run = check(compose(SMALL), 1)
    asked = run.config, run.layout, {}, 7, ("none",)
    chunked = run.config.with_value("loss.chunks", 8)
    assert depends_on(*asked) != depends_on(chunked, *asked[1:])


def test_the_oldest_plan_is_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "STEPS", Memo(2))
    run = check(compose(SMALL), 1)
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name

    for name in "abacba":
        engine._once([name], run.config, run.assembly, [], functools.partial(make, name))
    assert made == ["a", "b", "c", "a"]


def test_a_plan_from_disk_is_the_plan_that_was_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    run = compose([*SMALL, "cluster=h100", "strategy=[fsdp2]"])
    made = plan(run, 2)
    monkeypatch.setattr(engine, "STEPS", Memo(2))  # as in another process
    monkeypatch.setattr(kept, "trace", None)
    assert plan(run, 2) == made
    with pytest.raises(PlaitError, match="'NoneType' object is not callable"):  # it would be traced
        plan(run.with_value("train.local_batch_size", 4), 2)


@attrs.frozen
class Traced:
    """In place of pieces, which take longer."""

    layout: MeshLayout
    partial = False


def traced(config: Config, layout: MeshLayout, *_: object) -> list[Traced]:
    return [Traced(layout)]


def test_layouts_are_traced_even_if_they_are_more_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "PIECES", Memo(1))
    monkeypatch.setattr(traces, "kept", lambda *_: None)
    monkeypatch.setattr(traces, "pieces", traced)
    run = check(compose([*SMALL, "strategy=[]"]), 1).assembly.run
    run = attrs.evolve(run, world_size=2)
    found, _ = planning.compositions(run, {n: s for n, s in planning.offering(run).items() if n == "fsdp2"})
    chosen = sorted(set(representatives(found).values()))
    assert len(chosen) > 1
    made = {i: traced(run.config, found[i].pieces) for i in chosen}
    assert planning.traces(run, found, chosen, {}) == (made, len(chosen))
