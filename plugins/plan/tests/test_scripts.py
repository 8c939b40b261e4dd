"""What is traced of each stage: few micro-batches, as many on all stages of a rank, and each kind of action."""

import pytest

from plait.contract.stage_plan import WHOLE
from plait_pipeline import Pipeline
from plait_pipeline.order import stage_plan
from plait_plan.tracing.scripts import micros_of, script_of, scripts_of, states


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_stages_of_a_rank_get_all_micro_batches_that_are_traced(ranks: int) -> None:
    plan = stage_plan(Pipeline(ranks, "interleaved_1f1b"), [1] * (2 * ranks), 8)
    apart = 0
    for place in range(ranks):
        own = [script_of(plan, stage) for stage in plan.stages_of(place)]
        apart += len(set(map(micros_of, own))) > 1
        for script, short, stage in zip(scripts_of(plan, place), own, plan.stages_of(place), strict=True):
            assert script[: len(short)] == short
            for kind in ("forward", WHOLE):
                micros = sorted(micro for each, micro in script if each == kind)
                assert micros == list(range(max(map(micros_of, own))))
            kinds = [action.kind for action in plan.actions[place] if action.stage == stage]
            assert wholes(kinds) <= wholes([kind for kind, _ in script])
    assert apart > 0  # otherwise this would show nothing


def wholes(kinds: list[str]) -> set[tuple[int, bool]]:
    """The states of whole backwards."""
    return {state for kind, state in zip(kinds, states(kinds), strict=True) if kind == WHOLE}
