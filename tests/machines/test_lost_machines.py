"""What the other machine does, and says, when one refuses, is late, stops, crashes, or loses its power or its link."""

import json
import signal
import time

import pytest

from tests.helpers.commands import numbers, rows
from tests.helpers.disks import small_disk
from tests.helpers.machines import Machines, why_not
from tests.helpers.together import codes, outputs, train

SLOWLY = ["train.steps=400", "checkpoint.interval=10", "schedule.warmup_steps=4"]


def steps(tmp_path, least):
    """Whether the run has logged that many steps."""
    path = tmp_path / "runs" / "a"
    return (path / "metrics.jsonl").exists() and len(rows(path)) >= least


def wait(seen, *commands, within=300):
    deadline = time.monotonic() + within
    while not seen():
        assert time.monotonic() < deadline, outputs(*commands)
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("refusing", ["beta", "alpha"])
def test_what_one_machine_refuses_ends_the_others(refusing, machines, tmp_path):
    """Without this they wait for ten minutes, and do not learn why."""
    wrong = ["data=text", "data.path=nowhere.txt"]
    runs = {each.name: train(each, tmp_path, *(wrong if each.name == refusing else [])) for each in machines}
    own, other = runs.pop(refusing), runs.popitem()[1]
    assert codes(own, other) == [1, 1]
    sentence = "data.path=nowhere.txt does not exist"
    assert f"plait: {refusing} refuses the run: {sentence}" in other.output, outputs(own, other)
    assert f"plait: {sentence}" in own.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("alone", ["alpha", "beta"])
def test_a_machine_that_waits_says_for_whom(alone, machines, tmp_path):
    run = train(machines[alone], tmp_path, "launch.rendezvous_seconds=12")
    assert run.code() == 1
    if alone == "alpha":
        assert "waiting for 1 of 2 machines; here: alpha" in run.output
        assert "within launch.rendezvous_seconds=12 not all of launch.nnodes=2 machines met at" in run.output
    else:
        assert "waiting for the machine alpha at launch.rdzv_endpoint=alpha:29500: Connection refused" in run.output
        assert "did not meet at launch.rdzv_endpoint=alpha:29500 within launch.rendezvous_seconds=12" in run.output


@pytest.mark.slow
def test_the_endpoints_machine_may_come_last(machines, on_one_machine, tmp_path):
    on_beta = train(machines["beta"], tmp_path)
    on_beta.seen("waiting for the machine alpha")
    on_alpha = train(machines["alpha"], tmp_path)
    assert codes(on_alpha, on_beta) == [0, 0], outputs(on_alpha, on_beta)
    assert numbers(tmp_path / "runs" / "a") == on_one_machine


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["alpha", "beta"])
def test_a_signal_to_one_machine_saves_and_ends_both_at_once(stopped, machines, tmp_path):
    """torch's agents wait five minutes for the one that left."""
    runs = {machine.name: train(machine, tmp_path, *SLOWLY, "checkpoint.interval=1000") for machine in machines}
    wait(lambda: steps(tmp_path, 5), *runs.values())
    runs[stopped].signal(signal.SIGTERM)
    assert sorted(run.code() for run in runs.values()) == [143, 143], outputs(*runs.values())
    assert all("; saved step " in run.output for run in runs.values()), outputs(*runs.values())
    ends = [run.lines[-1][0] for run in runs.values()]
    assert max(ends) - min(ends) < 15, outputs(*runs.values())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["crash", "power_off"])
def test_a_lost_machine_that_comes_back(how, machines, tmp_path):
    on_alpha, on_beta = (train(machine, tmp_path, *SLOWLY) for machine in machines)
    wait(lambda: steps(tmp_path, 15), on_alpha, on_beta)
    getattr(machines["beta"], how)()
    on_alpha.seen("beta has not answered for 5 s; restarting all" if how == "power_off" else "restarting all")
    on_alpha.seen("waiting for 1 of 2 machines; here: alpha")
    machines["beta"].boot()
    again = train(machines["beta"], tmp_path, *SLOWLY)
    assert codes(on_alpha, again) == [0, 0], outputs(on_alpha, again)
    assert [row["step"] for row in rows(tmp_path / "runs" / "a")] == list(range(1, 401))
    assert "🏖" not in on_alpha.output
    assert "third_party" not in on_alpha.output


@pytest.mark.slow
def test_a_machine_lost_while_they_meet(machines, tmp_path):
    on_alpha, on_beta = (train(machine, tmp_path, *SLOWLY) for machine in machines)
    on_beta.seen("launch: local")
    machines["beta"].crash()
    machines["beta"].boot()
    again = train(machines["beta"], tmp_path, *SLOWLY)
    assert codes(on_alpha, again) == [0, 0], outputs(on_alpha, again)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["crash", "power_off"])
def test_the_endpoints_machine_comes_back(how, machines, tmp_path):
    on_alpha, on_beta = (train(machine, tmp_path, *SLOWLY) for machine in machines)
    wait(lambda: steps(tmp_path, 15), on_alpha, on_beta)
    getattr(machines["alpha"], how)()
    on_beta.seen("waiting for the machine alpha at launch.rdzv_endpoint=alpha:29500")
    machines["alpha"].boot()
    again = train(machines["alpha"], tmp_path, *SLOWLY)
    assert codes(again, on_beta) == [0, 0], outputs(again, on_beta)
    assert [row["step"] for row in rows(tmp_path / "runs" / "a")] == list(range(1, 401))


@pytest.mark.slow
def test_without_the_endpoints_machine_the_run_ends(machines, tmp_path):
    on_alpha, on_beta = (train(machine, tmp_path, *SLOWLY, "launch.rendezvous_seconds=60") for machine in machines)
    wait(lambda: steps(tmp_path, 15), on_alpha, on_beta)
    machines["alpha"].crash()
    assert on_beta.code() == 1
    last = on_beta.lines[-1][1]
    assert last.startswith("plait: alpha is gone, and the others cannot meet without it"), on_beta.output


@pytest.mark.slow
def test_a_link_that_is_cut_and_mended(machines, tmp_path):
    on_alpha, on_beta = (train(machine, tmp_path, *SLOWLY) for machine in machines)
    wait(lambda: steps(tmp_path, 15), on_alpha, on_beta)
    machines["beta"].cut()
    on_alpha.seen("beta has not answered for 5 s; restarting all")
    on_beta.seen("alpha has not answered for 5 s")
    machines["beta"].mend()
    assert codes(on_alpha, on_beta) == [0, 0], outputs(on_alpha, on_beta)


@pytest.mark.slow
def test_a_shared_disk_without_any_room_ends_both(tmp_path):
    """Where no machine can read how it ended, the one whose ranks failed tells the others."""
    if reason := why_not():
        pytest.skip(reason)
    with small_disk(16, tmp_path / "runs") as disk, Machines(tmp_path, "alpha", "beta") as machines:
        if disk.env:
            pytest.skip("no disk can be mounted here")
        runs = [train(machine, tmp_path, *SLOWLY, "launch.max_restarts=1000") for machine in machines]
        wait(lambda: steps(tmp_path, 5), *runs)
        disk.fill(0)
        assert codes(*runs) == [1, 1], outputs(*runs)
        for run in runs:
            said = [line for _, line in run.lines if line.startswith("plait: ")]
            assert len(said) == 1, run.output
            assert "the disk is full" in said[0], run.output


@pytest.mark.slow
def test_a_third_machine_is_a_spare(machines, tmp_path):
    on_alpha, on_beta = (train(machine, tmp_path, *SLOWLY) for machine in machines)
    wait(lambda: steps(tmp_path, 5), on_alpha, on_beta)
    spare = train(machines["beta"], tmp_path, *SLOWLY)
    spare.seen("is a spare: ")
    assert codes(on_alpha, on_beta, spare) == [0, 0, 0], outputs(on_alpha, on_beta, spare)
    assert "the run has ended, and beta was not needed" in spare.output
    assert json.loads((tmp_path / "runs" / "a" / "outcome.json").read_text())["kind"] == "finished"
