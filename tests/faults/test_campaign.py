"""The campaign notices what it must, and 25 faults of it hold."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import plait
from plait.launch.forks import SERVER
from tests.faults.place import Ended, Sandbox, environment_of
from tests.faults.scenario import POINTS
from tests.faults.several import cluster
from tests.faults.several.cluster import Cluster, Launcher
from tests.faults.several.run_time import RunTime, Used
from tests.faults.verdict import Defect, Reference, equal, quiet, refused, result_of
from tests.helpers.machines import why_not


@pytest.fixture
def place(tmp_path):
    return Sandbox(tmp_path, "one process", tmp_path / "text")


def left(place, losses, weights=b"weights"):
    """A run's folder with these losses and final weights."""
    run = place.run_folder
    (run / "export").mkdir(parents=True, exist_ok=True)
    (run / "export" / "model.safetensors").write_bytes(weights)
    rows = "".join(f'{{"step": {i}, "loss": {loss}}}\n' for i, loss in enumerate(losses, 1))
    (run / "metrics.jsonl").write_text(rows)
    return run


def test_equal_needs_every_number_and_every_weight(place):
    reference = result_of(left(place, [3.0, 2.0]))
    done = Ended(0, "", 1.0)
    assert equal(place, done, reference) == "equal"
    for losses, weights, why in (
        ([3.0, 2.0000000000000004], b"weights", r"loss of step 2 is 2\.0000000000000004 instead of 2\.0"),
        ([3.0], b"weights", "the steps are 1 to 1 instead of 1 to 2"),
        ([3.0, 2.0], b"other weights", "the final weights differ"),
    ):
        left(place, losses, weights)
        with pytest.raises(Defect, match=why):
            equal(place, done, reference)
    with pytest.raises(Defect, match="exit code 1"):
        equal(place, Ended(1, "plait: no", 1.0), reference)


def test_rows_that_somebody_removed_are_missed_only_if_the_run_says_so(place):
    reference = result_of(left(place, [3.0, 2.0]))
    (place.run_folder / "metrics.jsonl").unlink()
    said = "metrics: metrics.jsonl has only 0 rows of the 2 steps before"
    assert equal(place, Ended(0, said, 1.0), reference) == "equal"
    with pytest.raises(Defect, match="cannot be read"):
        equal(place, Ended(0, "", 1.0), reference)


def test_points_name_modules_that_there_are():
    core = Path(plait.__file__).parent
    modules = [".".join(path.relative_to(core.parent).with_suffix("").parts) for path in core.rglob("*.py")]
    for name, (_, event, pattern, most) in POINTS.items():
        if event == "import":
            found = [module for module in modules if re.search(pattern, module)]
            assert len(found) >= most, name
    assert re.search(POINTS["starting ranks"][2], " ".join(SERVER))


def test_a_refusal_is_one_sentence_that_names_the_cause(place):
    assert refused(place, Ended(1, "launch: local\nplait: key=3 must be 2\n", 1.0), "key") == "refused"
    for text, why in (
        ("", "0 sentences"),
        ("plait: one\nplait: two\n", "2 sentences"),
        ("plait: something failed\n", "does not name the cause"),
        ("Traceback (most recent call last):\n  x\nplait: key=3 must be 2\n", "on the console"),
    ):
        with pytest.raises(Defect, match=why):
            refused(place, Ended(1, text, 1.0), "key")
    with pytest.raises(Defect, match="should have been refused"):
        refused(place, Ended(0, "plait: key\n", 1.0))


def test_what_is_left_over_is_a_defect(place):
    reference = Reference([], {})
    left(place, [])
    (place.tmp / "scratch").touch()
    with pytest.raises(Defect, match="left in the temporary folder: scratch"):
        equal(place, Ended(0, "", 1.0), reference)
    (place.tmp / "scratch").unlink()
    (place.run_folder / "checkpoints" / "step-4.tmp").mkdir(parents=True)
    with pytest.raises(Defect, match=r"left in the run's folder: step-4\.tmp"):
        equal(place, Ended(0, "", 1.0), reference)


def test_a_process_left_over_is_found(place):
    sleeper = subprocess.Popen(["sleep", "60"], env=place.environment())
    assert place.processes() == [sleeper.pid]
    sleeper.kill()
    sleeper.wait()
    assert place.processes() == []


def test_a_process_is_known_by_its_environment_from_its_first_moment():
    for _ in range(50):  # one in seven has none yet when Popen returns
        sleeper = subprocess.Popen(["sleep", "60"], env=os.environ | {"PLAIT_FAULTS_PLACE": "here"})
        found = environment_of(Path(f"/proc/{sleeper.pid}"))
        sleeper.kill()
        sleeper.wait()
        assert b"PLAIT_FAULTS_PLACE=here" in found.split(b"\0")


def test_noise_of_every_kind_is_a_defect():
    for text in ("Exception in thread plait-data:\n", "Fatal Python error: Segmentation fault\n"):
        with pytest.raises(Defect):
            quiet(Ended(1, text, 1.0))


@pytest.mark.parametrize(("last", "silent"), [("launch: local", True), ("waiting for 1 of 2 machines", False)])
def test_a_wait_of_which_nobody_tells_is_a_defect(last, silent, place, monkeypatch):
    monkeypatch.setattr(cluster, "SILENCE", 0.0)
    console = place.root / "console"
    console.write_text(f"{last}\n")
    sleeper = subprocess.Popen(["sleep", "60"], cwd=place.work)
    one = Cluster(place, 2, 1, (), "2", launchers=[Launcher(sleeper.pid, console, 0.0)])
    monkeypatch.setattr(cluster, "LOOK", 0.0)
    try:
        one._listen()  # the process is news
        if silent:
            with pytest.raises(Defect, match="silent for more than 0 s"):
                one._listen()
        else:
            one._listen()
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_line_that_ends_a_wait_while_it_is_judged_is_no_defect(place, monkeypatch):
    monkeypatch.setattr(cluster, "SILENCE", 0.0)
    monkeypatch.setattr(cluster, "LOOK", 0.0)
    console = place.root / "console"
    console.write_text("waiting for beta\n")
    sleeper = subprocess.Popen(["sleep", "60"], cwd=place.work)
    one = Cluster(place, 2, 1, (), "2", launchers=[Launcher(sleeper.pid, console, 0.0)])
    live = Cluster.live

    def late(self):
        console.write_text("waiting for beta\nbeta left; going on with 1 machine: gamma\n")
        return live(self)

    try:
        one._listen()
        monkeypatch.setattr(Cluster, "live", late)
        one._listen()
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize(
    ("processes", "passed", "idle"),
    [
        ({1: {"a": Used(), "b": Used()}}, 10, 10),
        ({1: {"a": Used(computed=4), "b": Used(computed=3)}}, 10, 3),
        ({1: {"a": Used(waited=6)}, 2: {"a": Used(computed=1)}}, 4, 3),
        ({1: {"a": Used(waited=6)}, 2: {"a": Used(waited=6)}}, 0, 0),
        ({1: {"a": Used(disk=True)}}, 0, 0),
        ({1: {"a": Used()}, 3: {"a": Used(computed=50, waited=50)}}, 10, 0),
    ],
)
def test_the_time_of_a_run_stands_still_while_it_waits_for_the_machine(processes, passed, idle):
    run = RunTime()
    run.add(0, {1: {"a": Used(), "b": Used()}, 2: {"a": Used()}})
    run.add(10, processes)
    assert (run.passed, run.idle) == (passed, idle)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_fortieth_of_the_campaign(tmp_path):
    holds(tmp_path, "--count", "25")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_set_on_several_machines(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    holds(tmp_path, "--several", "--count", "8")


@pytest.mark.slow
def test_three_faults_on_two_machines(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    kinds = ("another command", "a rank killed", "a machine told to stop")
    holds(tmp_path, "--several", "--jobs", "3", "--once", *kinds)


def holds(tmp_path, *options):
    """In an interpreter of its own: scenarios are forks, and would have what other tests left in this one."""
    command = [sys.executable, "-m", "tests.faults", *options, "--seed", "1", "--results", str(tmp_path)]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
