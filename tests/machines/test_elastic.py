"""A run with `launch.nnodes=MIN:MAX`: machines leave and come, and every step is that of one machine."""

import contextlib
import json
import re
import signal
import time

import pytest

from tests.helpers import commands
from tests.helpers.commands import SMALL, rows
from tests.helpers.machines import Machines, why_not
from tests.helpers.together import codes, outputs

EXACT = [f"precision.{each}=float64" for each in ("param", "reduce", "storage")]
RUN = ["strategy=[fsdp2]", "run.name=a", "train.global_batch_size=8", "checkpoint.interval=10", *EXACT]
RUN += ["schedule.min_lr_ratio=1", "validation.interval=0", "checkpoint.export=false"]
MOE = ["model=qwen3_moe_debug", "model.head_dim=8", "model.n_experts=4", "model.ffn_dim=16"]
ENDLESS = "train.steps=100000"


@pytest.fixture
def some_machines(tmp_path):
    """Machines of these names, which share the folder `tmp_path`."""
    if reason := why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield lambda *names: stack.enter_context(Machines(tmp_path, *names))


def begin(machine, cwd, *overrides, ranks=1, nnodes="1:2"):
    together = [f"launch.nnodes={nnodes}", f"launch.nproc_per_node={ranks}", "launch.rdzv_endpoint=alpha:29500"]
    return machine.plait("train", *SMALL, *RUN, ENDLESS, *together, *overrides, cwd=cwd)


def wait_for_step(tmp_path, least, world, *runs, within=300):
    """Until the last step is `least` or a later one, on `world` ranks."""
    path, deadline = tmp_path / "runs" / "a" / "metrics.jsonl", time.monotonic() + within
    while not (path.exists() and (last := rows(path.parent)[-1:]) and last[0]["world_size"] == world) or (
        last[0]["step"] < least
    ):
        assert time.monotonic() < deadline, outputs(*runs)
        time.sleep(0.05)


def worlds(tmp_path):
    """The world sizes of the steps, in the order in which they followed each other."""
    sizes = [row["world_size"] for row in rows(tmp_path / "runs" / "a")]
    return [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]


def compare(tmp_path, reference):
    ours = rows(tmp_path / "runs" / "a")
    assert [row["step"] for row in ours] == [row["step"] for row in reference]
    for mine, other in zip(ours, reference, strict=True):
        for key in ("loss", "grad_norm"):
            assert abs(mine[key] - other[key]) <= 1e-9 * abs(other[key]), (mine, other)
        assert mine["tokens"] == other["tokens"]


def stop(tmp_path, *runs, alike=()):
    """End the run by Ctrl-C on the machine that holds the store, and compare it with as many steps on one rank.

    alike: what that rank is told, too."""
    runs[0].signal(signal.SIGINT)
    assert codes(*runs) == [130] * len(runs), outputs(*runs)
    assert "; saved step " in runs[0].output
    (tmp_path / "one").mkdir()
    here = [*RUN, *alike, f"train.steps={len(rows(tmp_path / 'runs' / 'a'))}", "launch.nproc_per_node=1"]
    assert commands.train(*here, cwd=tmp_path / "one").code == 0
    compare(tmp_path, rows(tmp_path / "one" / "runs" / "a"))


@pytest.mark.slow
def test_a_machine_that_comes_takes_part(machines, tmp_path):
    on_alpha = begin(machines["alpha"], tmp_path)
    wait_for_step(tmp_path, 1, 1, on_alpha)
    on_beta = begin(machines["beta"], tmp_path)
    wait_for_step(tmp_path, 1, 2, on_alpha, on_beta)
    assert "beta came; going on with 2 machines: alpha, beta" in on_alpha.output
    stop(tmp_path, on_alpha, on_beta)
    assert worlds(tmp_path) == [1, 2]


@pytest.mark.slow
def test_an_endpoint_with_a_name_of_loopback_waits_for_another(machines, tmp_path):
    machines["alpha"].knows({"alpha": "127.0.1.1", "beta": machines["beta"].address})
    on_alpha = begin(machines["alpha"], tmp_path)
    on_alpha.seen("waiting for another machine: launch.rdzv_endpoint=alpha:29500 is loopback here")
    on_beta = begin(machines["beta"], tmp_path)
    wait_for_step(tmp_path, 1, 2, on_alpha, on_beta)
    stop(tmp_path, on_alpha, on_beta)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "how"),
    [(["fsdp2"], "crash"), (["fsdp2"], "power_off"), (["tensor_parallel", "fsdp2"], "crash")],
    ids=lambda value: "+".join(value) if isinstance(value, list) else value,
)
def test_a_machine_is_lost_and_comes_back(strategy, how, machines, tmp_path):
    more = [f"strategy=[{','.join(strategy)}]", "launch.max_restarts=0"]
    ranks = len(strategy)
    runs = [begin(machine, tmp_path, *more, ranks=ranks) for machine in machines]
    wait_for_step(tmp_path, 15, 2 * ranks, *runs)
    getattr(machines["beta"], how)()
    runs[0].seen("beta left; going on with 1 machine: alpha")
    wait_for_step(tmp_path, 20, ranks, runs[0])
    machines["beta"].boot()
    again = begin(machines["beta"], tmp_path, *more, ranks=ranks)
    runs[0].seen("beta came; going on with 2 machines: alpha, beta")
    wait_for_step(tmp_path, 25, 2 * ranks, runs[0], again)
    stop(tmp_path, runs[0], again)
    assert worlds(tmp_path)[-2:] == [ranks, 2 * ranks]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["crash", "power_off"])
def test_the_endpoints_machine_is_lost_and_comes_back(how, machines, tmp_path):
    more = ["launch.max_restarts=0"]
    runs = [begin(machine, tmp_path, *more) for machine in machines]
    wait_for_step(tmp_path, 30, 2, *runs)
    getattr(machines["alpha"], how)()
    runs[1].seen("beta holds the store now, in the place of alpha")
    runs[1].seen("alpha left; going on with 1 machine: beta")
    wait_for_step(tmp_path, 40, 1, runs[1])
    machines["alpha"].boot()
    again = begin(machines["alpha"], tmp_path, *more)
    runs[1].seen("alpha came; going on with 2 machines: alpha, beta")
    wait_for_step(tmp_path, 50, 2, runs[1], again)
    stop(tmp_path, runs[1], again)
    assert worlds(tmp_path)[-2:] == [1, 2]


@pytest.mark.slow
def test_one_holder_of_the_store_after_another_is_lost(some_machines, tmp_path):
    machines = some_machines("alpha", "beta", "gamma")
    runs = {each.name: begin(each, tmp_path, "train.global_batch_size=12", nnodes="1:3") for each in machines}
    runs["alpha"].seen("with 3 machines: alpha, beta, gamma", 120)
    wait_for_step(tmp_path, 30, 3, *runs.values())
    machines["alpha"].crash()
    wait_for_step(tmp_path, 40, 2, *runs.values())
    holder = "beta" if "beta holds the store now" in runs["beta"].output else "gamma"
    last = "gamma" if holder == "beta" else "beta"
    runs[last].seen("alpha left; going on with 2 machines: beta, gamma")
    wait_for_step(tmp_path, 60, 2, *runs.values())
    machines[holder].crash()
    runs[last].seen(f"{last} holds the store now, in the place of {holder}")
    wait_for_step(tmp_path, 70, 1, *runs.values())
    stop(tmp_path, runs[last], alike=["train.global_batch_size=12"])
    assert worlds(tmp_path)[-3:] == [3, 2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["alpha", "beta"])
def test_of_two_parts_of_a_split_network_one_trains(cut, machines, tmp_path):
    runs = [begin(machine, tmp_path) for machine in machines]
    wait_for_step(tmp_path, 30, 2, *runs)
    machines[cut].cut()
    runs[0].seen("beta left; going on with 1 machine: alpha")
    runs[1].seen("waiting for the machine that holds the store now")
    wait_for_step(tmp_path, 200, 1, *runs)
    machines[cut].mend()
    runs[0].seen("going on with 2 machines: alpha, beta")
    wait_for_step(tmp_path, 210, 2, *runs)
    stop(tmp_path, *runs)
    assert "holds the store now, in" not in outputs(*runs)


@pytest.mark.slow
def test_a_stream_goes_on_with_the_same_samples(machines, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"<{i} " + "words " * (i * 5 % 11)}) + "\n" for i in range(300)))
    data = ["data=hf", "data.name=json", f"data.data_files={text}", "data.shuffle_buffer=7"]
    data += ["data.validation_documents=0"]
    on_alpha = begin(machines["alpha"], tmp_path, *data)
    wait_for_step(tmp_path, 5, 1, on_alpha)
    on_beta = begin(machines["beta"], tmp_path, *data)
    wait_for_step(tmp_path, 1, 2, on_alpha, on_beta)
    saved = rows(tmp_path / "runs" / "a")[-1]["step"] + 15
    wait_for_step(tmp_path, saved, 2, on_alpha, on_beta)
    machines["beta"].crash()
    wait_for_step(tmp_path, saved, 1, on_alpha)
    stop(tmp_path, on_alpha, alike=[*data, "train.data_parts=2"])
    assert worlds(tmp_path) == [1, 2, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("leaves", "stays"), [("beta", "alpha"), ("alpha", "beta")])
def test_a_machine_that_is_asked_to_leave_loses_no_step(leaves, stays, machines, tmp_path):
    """Also the one that holds the store."""
    more = ["checkpoint.interval=0"]
    runs = {machine.name: begin(machine, tmp_path, *more) for machine in machines}
    wait_for_step(tmp_path, 30, 2, *runs.values())
    runs[leaves].signal(signal.SIGTERM)
    assert runs[leaves].code() == 143, outputs(*runs.values())
    assert "; saved step " in runs[leaves].output
    runs[stays].seen(f"{leaves} left; going on with 1 machine: {stays}")
    assert "has not answered" not in runs[stays].output
    assert ("beta holds the store now, in the place of alpha" in runs["beta"].output) == (leaves == "alpha")
    wait_for_step(tmp_path, 40, 1, *runs.values())
    runs[leaves] = begin(machines[leaves], tmp_path, *more)
    runs[stays].seen(f"{leaves} came; going on with 2 machines: alpha, beta")
    wait_for_step(tmp_path, 50, 2, *runs.values())
    stop(tmp_path, runs[stays], runs[leaves])
    assert worlds(tmp_path)[-3:] == [2, 1, 2]


@pytest.mark.slow
def test_a_plan_for_each_number_of_machines_is_ready(machines, tmp_path):
    plan = ["strategy=[autoparallel]", "strategy.autoparallel.strategies=[fsdp2]", "cluster=cpu"]
    on_alpha = begin(machines["alpha"], tmp_path, *plan)
    wait_for_step(tmp_path, 1, 1, on_alpha)
    assert {path.name for path in (tmp_path / "runs" / "a").glob("plan*")} == {"plan-1.yaml", "plan-2.yaml"}
    on_beta = begin(machines["beta"], tmp_path, *plan)
    wait_for_step(tmp_path, 1, 2, on_alpha, on_beta)
    on_alpha.seen("autoparallel: follows the plan ")
    stop(tmp_path, on_alpha, on_beta)
    assert worlds(tmp_path) == [1, 2]


@pytest.mark.slow
def test_a_run_that_was_stopped_resumes_on_another_number_of_machines(machines, tmp_path):
    runs = [begin(machine, tmp_path) for machine in machines]
    wait_for_step(tmp_path, 5, 2, *runs)
    for run in runs:
        run.signal(signal.SIGTERM)
    assert codes(*runs) == [143, 143], outputs(*runs)
    on_alpha = begin(machines["alpha"], tmp_path)
    wait_for_step(tmp_path, 10, 1, on_alpha)
    stop(tmp_path, on_alpha)
    assert worlds(tmp_path)[-2:] == [2, 1]


@pytest.mark.slow
def test_a_machine_more_than_the_most_replaces_one_that_is_lost(some_machines, tmp_path):
    machines = some_machines("alpha", "beta", "gamma")
    runs = [begin(machine, tmp_path) for machine in [*machines][:2]]
    wait_for_step(tmp_path, 5, 2, *runs)
    runs.append(begin(machines["gamma"], tmp_path))
    runs[2].seen("gamma is a spare: alpha, beta train already")
    machines["beta"].crash()
    runs[0].seen("beta left; gamma came; going on with 2 machines: alpha, gamma")
    wait_for_step(tmp_path, rows(tmp_path / "runs" / "a")[-1]["step"] + 15, 2, *runs)
    stop(tmp_path, runs[0], runs[2])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor_parallel", "pipeline", "expert_parallel"])
def test_a_spare_takes_over_under_a_fixed_degree(strategy, some_machines, tmp_path):
    """Of three machines two fit. The third is told so, and takes the place of one that is asked to leave."""
    machines = some_machines("alpha", "beta", "gamma")
    model = MOE if strategy == "expert_parallel" else []
    more = [f"strategy=[{strategy},fsdp2]", f"strategy.{strategy}.degree=2", *model]
    runs = {machine.name: begin(machine, tmp_path, *more, nnodes="2:4") for machine in machines}
    runs["alpha"].seen("2 or 4 machines meet at")
    wait_for_step(tmp_path, 10, 2, *runs.values())
    leaves = "beta" if "beta" in re.findall("with 2 machines: (.*)", runs["alpha"].output)[-1] else "gamma"
    spare = "gamma" if leaves == "beta" else "beta"
    runs[spare].seen(f"{spare} is a spare: alpha, {leaves} train already")
    runs[leaves].signal(signal.SIGTERM)
    assert runs.pop(leaves).code() == 143, outputs(*runs.values())
    runs["alpha"].seen(f"{leaves} left; {spare} came; going on with 2 machines: alpha, {spare}")
    wait_for_step(tmp_path, rows(tmp_path / "runs" / "a")[-1]["step"] + 10, 2, *runs.values())
    stop(tmp_path, *runs.values(), alike=model)
    assert worlds(tmp_path) == [2]


@pytest.mark.slow
def test_several_that_come_are_one_change(some_machines, tmp_path):
    """One more than there is would not fit the batch, so it waits for the other."""
    machines = some_machines("alpha", "beta", "gamma")
    batch = ["train.global_batch_size=9", "train.local_batch_size=1"]
    runs = [begin(machines["alpha"], tmp_path, *batch, nnodes="1:3")]
    wait_for_step(tmp_path, 5, 1, *runs)
    runs += [begin(machines[name], tmp_path, *batch, nnodes="1:3") for name in ("beta", "gamma")]
    runs[0].seen("beta and gamma came; going on with 3 machines: alpha, beta, gamma", 120)
    wait_for_step(tmp_path, 10, 3, *runs)
    stop(tmp_path, *runs, alike=batch)
    assert worlds(tmp_path) == [1, 3]


@pytest.mark.slow
def test_machines_too_many_for_the_batch_are_spares(some_machines, tmp_path):
    machines = some_machines("alpha", "beta", "gamma", "delta")
    runs = [begin(machine, tmp_path, nnodes="1:4") for machine in [*machines][:3]]
    runs[0].seen("1, 2 or 4 machines meet at")
    wait_for_step(tmp_path, 1, 2, *runs)
    runs.append(begin(machines["delta"], tmp_path, nnodes="1:4"))
    runs[0].seen("going on with 4 machines: alpha, beta, delta, gamma")
    wait_for_step(tmp_path, 1, 4, *runs)
    stop(tmp_path, *runs)
    assert worlds(tmp_path)[-1] == 4
