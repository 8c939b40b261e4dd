"""A compiled run is planned with the graphs that inductor makes: it keeps less, and no kernel is made."""

from pathlib import Path

import pytest

from plait.host import compose
from plait_plan.engine import plan
from plait_plan.values import Plan

RUN = ["train.seq_len=512", "validation.interval=0", "cluster=h100", "precision.param=bfloat16"]


def planned(*overrides: str, world: int = 4) -> Plan:
    return plan(compose([*RUN, *overrides]), world)


@pytest.mark.parametrize("strategies", ["[fsdp2]", pytest.param("[tensor_parallel,fsdp2]", marks=pytest.mark.slow)])
def test_a_compiled_run_is_faster_keeps_less_and_sends_the_same(
    strategies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    run = f"strategy={strategies}"
    plain, compiled = (planned(run, f"compile.enabled={on}") for on in ("false", "true"))
    assert plain.time is not None
    assert compiled.time is not None
    assert all(c < p for c, p in zip(compiled.time.compute, plain.time.compute, strict=True))
    assert (compiled.flops, compiled.collectives) == (plain.flops, plain.collectives)
    assert compiled.memory.activations < 0.9 * plain.memory.activations
    assert compiled.memory.logits < 0.8 * plain.memory.logits
    assert compiled.memory.parameters == plain.memory.parameters
    assert compiled.notes == plain.notes
    assert not list(tmp_path.rglob("*.cpp"))


def test_full_recomputation_runs_attention_again() -> None:
    """Inductor keeps the state of the random numbers for it, in an operator around the operator."""
    none, full = (
        planned("strategy=[]", "compile.enabled=true", f"remat.mode={mode}", world=1) for mode in ("none", "full")
    )
    assert full.memory.activations < 0.5 * none.memory.activations
    calls = [{w.operator: w.count for w in one.work} for one in (none, full)]
    (attention,) = (name for name in calls[0] if "attention" in name and "backward" not in name)
    assert calls[1][attention] == 2 * calls[0][attention]


@pytest.mark.parametrize("own", ["strategy=[simplefsdp]", "compile.backend=aot_eager"])
def test_another_compiler_is_planned_as_if_there_were_none(own: str) -> None:
    plain, compiled = (planned("strategy=[fsdp2]", own, f"compile.enabled={on}") for on in ("false", "true"))
    assert compiled.memory == plain.memory
    (note,) = set(compiled.notes) - set(plain.notes)
    assert note.startswith("memory is planned without compile.enabled and will be lower")
