"""How this repository runs its tests: what is left to `make test-all`, and what one of two processes has to itself."""

import gc
import os
import signal
from typing import Any

import pytest

# On some CPUs (an AMD EPYC, say) MKL rounds a product by where its operands lie in memory: two strategies that add in
# one order then differ in the last bit of float32. Set before torch is imported, and inherited by the ranks.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

# A job of `nohup`, or in a shell's background, begins with these ignored, and so would the runs that tests interrupt.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_itemcollected(item: Any) -> None:
    if getattr(getattr(item, "cls", None), "layouts", None) and _leave_to_all(item, item.cls.strategy):
        item.add_marker(pytest.mark.slow)
    # one pool of ranks, beside tests that start none; one undisturbed run for all who look at it
    shared = {"plait_ranks": "ranks", "watched": "undisturbed"}
    used = [group for fixture, group in shared.items() if fixture in getattr(item, "fixturenames", ())]
    item.add_marker(pytest.mark.xdist_group(used[0] if used else item.path.name))


def _leave_to_all(item: Any, strategy: str) -> bool:
    """Of the suite: what takes long, and has a like that `make test` runs."""
    if item.name.startswith("test_checkpoint_loads_in"):
        return True  # tests/checkpoint/test_layouts.py loads each layout into each, simplefsdp's test_hops.py beside it
    if item.name.startswith("test_killed_and_resumed"):
        return True  # three starts of `plait train`; tests/whole_runs has quicker ones that stop and go on
    if item.name.startswith("test_composes_with"):
        other = item.callspec.params["other"] or ""
        if "lora" in (strategy, other):
            return True  # its tests/test_numerics.py trains beside each, with more than zeros
        return other < strategy or {strategy, other} in LAYOUTS  # a pair once
    if item.name.startswith(FOLLOWED) and strategy in ("autoparallel", "lora"):
        return True
    if item.name.startswith("test_compiled_and"):
        return strategy != "tensor_parallel"  # the others have quicker tests that compile and recompute
    if item.name.startswith("test_the_compiled_loss"):
        return True  # the loss by chunks is quick without, and each strategy compiles in its own tests
    if item.name.startswith("test_packed_documents"):
        return strategy not in ("context_parallel", "tensor_parallel", "pipeline")  # they change what blocks get
    if item.name.startswith("test_two_runs"):
        return strategy not in ("fsdp2", "expert_parallel")
    if item.name.startswith("test_recomputation_changes_nothing[selective]"):
        return strategy != "fsdp2"  # beside it all of expert_parallel's test_compile.py
    if item.name.startswith("test_a_run_equals"):
        return strategy in ("simplefsdp", "expert_parallel")  # they deal batches as fsdp2 does
    return item.name.startswith("test_compiled_equals")  # beside the same, recomputed


# Pairs that the suite of one of them runs for 20 steps.
LAYOUTS = (
    *({"fsdp2", "tensor_parallel"}, {"fsdp2", "expert_parallel"}, {"fsdp2", "context_parallel"}),
    *({"fsdp2", "pipeline"}, {"tensor_parallel", "pipeline"}),
)

# With a plan, autoparallel only configures fsdp2 before anything is built: fsdp2's own suite runs the same features.
# lora's own tests train and save with more than the zeros that the suite starts from.
FOLLOWED = (
    *("test_models_equal", "test_accumulation", "test_recomputation", "test_float32", "test_the_loss_by_chunks"),
    *("test_mixed_precision", "test_tied_parameters", "test_a_run_equals", "test_two_runs", "test_nothing_is_left"),
    *("test_checkpoint_", "test_clipping", "test_every_token", "test_no_rank_holds"),
)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()  # what was imported and collected stays: no collection needs to look at it
    if getattr(session.config.option, "loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist keeps no groups under this pytest: two pools would fight for cores")
