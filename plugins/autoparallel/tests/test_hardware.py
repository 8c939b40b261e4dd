"""What binds a search: the user's own values, and no hardware file."""

import pytest

from plait.host import check, compose

SEARCH = ("strategy=[autoparallel]", "model.n_layers=1", "train.seq_len=64", "cluster=h100", "launch.device=cpu")


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        pytest.param(["+hardware=h100", "strategy=[fsdp2]"], "selective", marks=pytest.mark.slow),
        (["+hardware=h100", "strategy=[autoparallel]"], "none"),
        pytest.param(["+hardware=h100", "strategy=[autoparallel]", "remat.mode=full"], "full", marks=pytest.mark.slow),
        (["remat.mode=selective", "strategy=[autoparallel]"], "selective"),
    ],
)
def test_a_hardware_file_sets_nothing_that_the_search_decides(overrides, mode):
    node = compose(overrides)
    assert node.remat.mode == mode
    assert node.compile.enabled == ("+hardware=h100" in overrides)  # what it does not decide


@pytest.mark.slow
def test_what_binds_a_search_is_named_and_its_report_has_no_step_time_beside_the_plans():
    binding = (
        "remat.mode=full",
        "strategy.autoparallel.axes={dp_shard: 2}",
        "strategy.autoparallel.strategies=[fsdp2]",
        "train.global_batch_size=16",
    )
    ((line, report),) = check(compose([*SEARCH, *binding]), 2).said
    words = (
        "strategy.autoparallel.axes={dp_shard: 2}, strategy.autoparallel.strategies=[fsdp2], remat.mode=full, "
        "train.global_batch_size=16"
    )
    assert line.endswith(f"; bound by {words}")
    assert f"given    {words}" in report.splitlines()
    assert "step, of the first" in report
    assert " ms" not in report  # the plan above tells it


def test_of_a_compiled_run_the_console_says_what_its_time_is():
    ((line, report),) = check(compose([*SEARCH, "compile.enabled=true", "compile.backend=eager"]), 1).said
    assert " a step before it is compiled, " in line
    assert "bound by" not in line
    assert "given    nothing" in report
    assert report.splitlines()[0].startswith("plan ")
