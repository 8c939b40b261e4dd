"""The pytest plugin of `plait.testing`: nothing to those who do not use it; to others ranks, and a grade."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest

from plait_testing.count import Collective
from plait_testing.grade import outcome_of
from plait_testing.pool import Pool, RankError, TooFewDevices
from plait_testing.suite.resources import _compare
from tests.helpers.commands import environment

INERT = """
import sys

def test_nothing_was_imported():
    assert "torch" not in sys.modules
    assert not [name for name in sys.modules if name.startswith("plait_testing.suite")]
"""

GRADED = """
import pytest
from plait_testing.model_suite.subject import Subject
from plait_testing.optimizer_suite import OptimizerSuite
from plait_testing.suite.capabilities import Capabilities

class TestGhost(Capabilities):
    strategy, layouts = "ghost", {}
    def test_passes(self): pass
    def test_is_refused(self): pytest.skip("refused: 'ghost' says no")
    def test_is_skipped(self): pytest.skip("no other strategy")
    def test_fails(self): assert False
    def pytest_generate_tests(self, metafunc):
        if "other" in metafunc.fixturenames:
            metafunc.parametrize("other", ["zero", "ddp"])
    def test_composes(self, other): other == "zero" or pytest.skip("refused: 'ghost' says no")

class TestModel(Subject):
    model = "spook"
    def test_passes(self): pass

class TestOptimizer(OptimizerSuite):
    optimizer = {"_target_": "ghosts.Haunt"}
    test_one_process_takes_it = test_steps_equal_one_process = None
    test_a_resumed_run_goes_on_bitwise = test_a_run_goes_on_in_another_layout = None
    def test_is_skipped(self): pytest.skip("no strategy is installed")

class TestOther:
    strategy = model = "of something else"
    def test_passes(self): pass
"""

END = r"(?:\n|$)"  # pytest may add what it knows of an assert in a line of its own


def run_pytest(folder, text, *options):
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, "test_it.py"]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=60)


def test_it_is_inert(tmp_path):
    done = run_pytest(tmp_path, INERT)
    assert done.returncode == 0, done.stdout
    assert "conformance" not in done.stdout


@pytest.mark.slow
def test_the_grade(tmp_path):
    said = run_pytest(tmp_path, GRADED, "--plait-grade", "grades").stdout
    assert "\nHaunt: 1 skipped\nghost: 2 passed, 2 refused, 1 skipped, 1 failed\nspook: 1 passed\n" in said
    assert "of something else" not in said
    written = {path.name: json.loads(path.read_text()) for path in (tmp_path / "grades").iterdir()}
    suites = {name.partition(".")[0]: written.pop(name) for name in list(written) if name.endswith(".suite.json")}
    badges = {name.partition(".")[0]: badge for name, badge in written.items()}
    assert badges["ghost"] == {
        "schemaVersion": 1,
        "label": "plait",
        "message": "2 passed, 2 refused, 1 skipped, 1 failed",
        "color": "red",
    }
    assert {name: badge["color"] for name, badge in badges.items() if name != "ghost"} == {
        "Haunt": "brightgreen",
        "spook": "brightgreen",
    }
    assert {name: told["kind"] for name, told in suites.items()} == {
        "Haunt": "optimizer",
        "ghost": "strategy",
        "spook": "model",
    }
    assert suites["ghost"]["beside"] == {"ddp": "refused", "zero": "passed"}
    assert suites["ghost"]["counts"] == {"passed": 2, "refused": 2, "skipped": 1, "failed": 1}
    assert suites["ghost"]["torch"] == version("torch")


def hang(seconds):
    import time

    import torch.distributed as dist

    if dist.get_rank() == 0:
        this_rank_waits_for_nobody(time.sleep, seconds)


def this_rank_waits_for_nobody(sleep, seconds):
    sleep(seconds)


@pytest.mark.slow
def test_a_hang_is_cut_and_every_stack_is_shown(plait_ranks):
    with plait_ranks.fresh(2) as pool:
        pool.run(hang, 0, world=2)
        with pytest.raises(RankError, match=r"did not answer within 4 s: they hang") as caught:
            pool.run(hang, 100, world=2, timeout=4)
    said = str(caught.value)
    assert "this_rank_waits_for_nobody" in said
    assert "rank-0:" in said
    assert "rank-1:" in said


def wait_for_the_other():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.barrier()


def test_the_first_line_names_the_rank_that_failed_first(plait_ranks, monkeypatch):
    """Also if this process, on a busy machine, hears of both at once."""
    unhurried = plait_ranks._answers
    monkeypatch.setattr(plait_ranks, "_answers", lambda *args: (time.sleep(1), unhurried(*args))[1])
    with pytest.raises(RankError, match=r"\Arank 1: ValueError: the cause\n") as caught:
        plait_ranks.run(wait_for_the_other, world=2)
    assert 'raise ValueError("the cause")' in str(caught.value)


class TestTimeout(BaseException):
    """As pytest-timeout raises it: from a signal handler, past `except Exception`."""

    __test__ = False


def join_slowly():
    """Patch this rank, for the runs that follow, so that a second passes between its group's connection and its use."""
    import torch.distributed as dist

    connect = dist.init_process_group

    def slow(*args, **options):
        connect(*args, **options)
        if options["rank"] == 1:
            time.sleep(1)
        joined.append(time.monotonic())

    joined: list[float] = []
    changed: Any = dist
    changed.init_process_group, changed.joined = slow, joined


def begun():
    import torch.distributed as dist

    changed: Any = dist
    return changed.joined[-1], time.monotonic()


def test_no_function_begins_before_all_ranks_have_joined(plait_ranks):
    """One that fails at once would close the connections that others still make, and these could never join again."""
    with plait_ranks.fresh(2) as pool:
        pool.run(join_slowly, world=2)
        times = pool.run(begun, world=2)
    assert max(joined for joined, _ in times) <= min(start for _, start in times)


def test_ranks_of_a_test_that_was_cut_do_not_hold_up_the_next(plait_ranks):
    def cut(*_):
        raise TestTimeout

    with plait_ranks.fresh(2) as pool:
        pool.run(hang, 0, world=2)
        before = signal.signal(signal.SIGUSR2, cut)
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        with pytest.raises(TestTimeout):
            pool.run(hang, 100, world=2)
        signal.signal(signal.SIGUSR2, before)
        assert len(pool.run(os.getpid, world=2, timeout=20)) == 2


def test_a_rank_that_was_ended_between_two_calls_is_replaced(plait_ranks):
    (pid, _) = plait_ranks.run(os.getpid, world=2)
    os.kill(pid, signal.SIGKILL)
    while plait_ranks._ranks[0][0].is_alive():
        time.sleep(0.01)
    assert pid not in plait_ranks.run(os.getpid, world=2)


def test_more_ranks_than_gpus():
    with pytest.raises(TooFewDevices, match="64 ranks need a GPU each, but there are "):
        Pool(4, "nccl").run(print, world=64)


def test_a_rank_that_crashes_leaves_its_stack(plait_ranks):
    def segfaults():
        import ctypes

        ctypes.string_at(0)

    with pytest.raises(RankError, match="the process of rank 0 died") as caught, plait_ranks.fresh(1) as ranks:
        ranks.run(segfaults, world=1)
    assert "Fatal Python error: Segmentation fault" in str(caught.value)
    assert "in segfaults" in str(caught.value)


def test_collectives_that_differ_from_what_was_declared_are_named() -> None:
    declared, other = Collective("all_reduce", "dp", 2, 64), Collective("all_gather", "tp", 1, 8)
    _compare([declared, other], [other, declared], {}, 0)
    with pytest.raises(AssertionError, match=f"rank 3: declared: {declared}, none was seen; seen: none{END}"):
        _compare([], [declared], {}, 3)
    with pytest.raises(AssertionError, match=f"none was seen; seen: {other}{END}"):
        _compare([other], [declared], {}, 3)
    with pytest.raises(AssertionError, match=f"rank 3: not declared: {other}{END}"):
        _compare([declared, other], [declared], {}, 3)
    _compare([declared, other], [declared], {"tp": 1}, 3)  # nobody to gather from


def kept_of_meshes() -> tuple[int, int]:
    """How many ways to gather tensors torch has kept: (from before, with that of this call)."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, _redistribute, distribute_tensor

    kept = _redistribute._gen_transform_infos.cache_info
    before = kept().currsize
    distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)]).full_tensor()
    return before, kept().currsize


def test_ranks_forget_what_torch_keeps_of_the_groups_of_the_last_call(plait_ranks: Pool) -> None:
    for _ in range(2):
        for before, after in plait_ranks.run(kept_of_meshes, world=2):
            assert before == 0 < after


@pytest.mark.parametrize(
    ("outcome", "reason", "grade"),
    [
        ("skipped", "Skipped: refused: 'ghost' says no", "refused"),
        ("skipped", "Skipped: no other strategy", "skipped"),
        ("passed", None, "passed"),
        ("error", None, "failed"),
    ],
)
def test_only_what_the_strategy_refuses_counts_as_refused(outcome, reason, grade):
    assert outcome_of(outcome, SimpleNamespace(longrepr=reason and ("test_it.py", 1, reason))) == grade
