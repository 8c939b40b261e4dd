"""Launchers of other packages: how a run chooses one, what it may say, and that its ranks train as torchrun's do."""

import os
import sys
from pathlib import Path
from unittest import mock

import pytest

from plait.contract.config import Launch
from plait.contract.errors import PlaitError
from plait.launch.launched import among_machines, rank_here
from plait.launch.launcher import launch_mode
from plait.strategies.registry import installed
from plait.system.errors import one_line
from plait.testing import raises_about
from tests.docs.pages import ROOT, blocks
from tests.helpers.commands import free_port, numbers, start
from tests.helpers.fakes import distribution, forget

EXAMPLE = next(b.text for b in blocks(ROOT / "docs/kinds.md") if str(b.file).endswith("mpich.py"))
TORCHRUNS = {"PMI_RANK": "RANK", "PMI_SIZE": "WORLD_SIZE", "MPI_LOCALRANKID": "LOCAL_RANK"}
TORCHRUNS |= {"MPI_LOCALNRANKS": "LOCAL_WORLD_SIZE"}
MPI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OF_RANKS = (*TORCHRUNS.values(), "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
SAYS = "def detect(env): return True\ndef variables(env): return {}\n"
WHOLE = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "localhost"}
WHOLE |= {"MASTER_PORT": 29500}
BROKEN = "raise SystemExit('imported')"
MINE = "launcher 'mine' (plait-mine 1.0)"
FSDP = ("strategy=[fsdp2]", "train.steps=4", "validation.interval=0", "checkpoint.enabled=false")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in OF_RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget(tmp_path)


def launcher(folder: Path, code: str, name: str = "mine") -> None:
    """Install a package with the launcher `name`."""
    distribution(folder, f"plait-{name}", code=code)
    points = f"[plait.launchers]\n{name} = plait_{name}\n"
    (folder / f"plait_{name}-1.0.dist-info" / "entry_points.txt").write_text(points)


def imported(*names: str) -> list[str]:
    return [name for name in names if f"plait_{name}" in sys.modules]


def said(of: dict[str, object]) -> str:
    """A launcher that says this of every process."""
    return SAYS.replace("{}", repr(of))


@pytest.mark.slow
def test_two_processes_of_mpich_train_as_those_of_torchrun(folder):
    """Bitwise. They are started here one by one, as mpirun would."""
    launcher(folder, EXAMPLE, "mpich")
    runs = []
    for name, mode in {"mpi": "mpich", "torchrun": "auto"}.items():
        meet = {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(folder)}
        for rank in ("0", "1"):
            told = {**MPI, "PMI_RANK": rank, "MPI_LOCALRANKID": rank}
            if name == "torchrun":
                told = {TORCHRUNS[theirs]: value for theirs, value in told.items()} | {"MASTER_ADDR": "localhost"}
            options = (*FSDP, f"launch.mode={mode}", f"run.name={name}")
            runs.append(start(*options, cwd=folder, **meet, **told))
    texts = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * 4, texts
    assert [text.count("launch: external, 2 rank(s)") for text in texts] == [1, 0, 1, 0]
    assert len(numbers(folder / "runs/mpi")) == 4
    assert numbers(folder / "runs/mpi") == numbers(folder / "runs/torchrun")


def test_the_example_says_what_torchrun_would(folder):
    launcher(folder, EXAMPLE, "mpich")
    for mode in ("auto", "external", "mpich"):
        with mock.patch.dict(os.environ, MPI, MASTER_PORT="2000"):
            assert launch_mode(Launch(mode=mode)) == "external"
            assert {name: os.environ[name] for name in WHOLE} == {k: str(v) for k, v in WHOLE.items()} | {
                "MASTER_PORT": "2000"
            }
    apart = {**MPI, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
    with mock.patch.dict(os.environ, apart), raises_about("MASTER_ADDR"):
        launch_mode(Launch())
    with raises_about("launch.mode", "mpich", ("local",)):
        launch_mode(Launch(mode="mpich"))


def test_no_launcher_is_imported_that_need_not_be_asked(folder):
    launcher(folder, BROKEN)
    launcher(folder, said(WHOLE), "other")
    several = {"PMI_SIZE": "2"}
    with mock.patch.dict(os.environ):
        assert launch_mode(Launch()) == "local"
        os.environ |= several
        assert launch_mode(Launch(mode="local")) == "local"
        assert launch_mode(Launch(nnodes=2, rdzv_endpoint="a:1")) == "local"
        os.environ |= {name: str(value) for name, value in WHOLE.items()}
        assert launch_mode(Launch()) == "external"
    assert imported("mine", "other") == []
    with mock.patch.dict(os.environ):
        assert launch_mode(Launch(mode="other")) == "external"  # though nothing counts processes
    assert imported("mine", "other") == ["other"]
    with mock.patch.dict(os.environ, several), pytest.raises(PlaitError, match="it calls sys"):
        launch_mode(Launch())
    with mock.patch.dict(os.environ, several, PLAIT_DISABLE_PLUGINS="mine,other"), raises_about("PMI_SIZE", "2"):
        launch_mode(Launch())


WRONG = {  # what it is at fault for -> its code, the key, the value, what would fit, the sentence's words
    "no mapping": (
        SAYS.replace("{}", "[]"),
        "launch.mode",
        "mine",
        ("RANK", "MASTER_PORT"),
        f"{MINE} returned [] from",
    ),
    "another variable": (said({**WHOLE, "SIZE": 2}), "launch.mode", "mine", ("RANK",), f"{MINE} returned SIZE from"),
    **{name: (said({**WHOLE, name: ""}), name, None, (), f"{MINE} does not say {name}") for name in WHOLE},
    "rank": (said({**WHOLE, "RANK": 2}), "RANK", "2", "a whole number from 0 to 1", MINE),
    "world": (said({**WHOLE, "WORLD_SIZE": True}), "WORLD_SIZE", "True", "a whole number of at least 1", MINE),
    "here": (said({**WHOLE, "LOCAL_WORLD_SIZE": 3}), "LOCAL_WORLD_SIZE", "3", "from 1 to 2", MINE),
    "rank here": (said({**WHOLE, "LOCAL_RANK": 2}), "LOCAL_RANK", "2", "from 0 to 1", MINE),
    "port": (said({**WHOLE, "MASTER_PORT": 0}), "MASTER_PORT", "0", "from 1 to 65535", MINE),
    "machine": (said({**WHOLE, "MASTER_ADDR": "a..b"}), "MASTER_ADDR", "a..b", "can be found", ""),
    "no function": (
        "def detect(env): return True",
        "launch.mode",
        "mine",
        "with detect and one of variables, machines",
        MINE,
    ),
    "its own": (
        f"from plait import PlaitError\n{SAYS.replace('return {}', 'raise PlaitError(1).at(2)')}",
        *(2, None, (), f"raised by {MINE} in its function 'variables'"),
    ),
}
for local in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # may be missing, but not empty
    WRONG[local] = (said({**WHOLE, local: ""}), local, "", "a whole number", MINE)


@pytest.mark.parametrize("case", WRONG)
def test_what_a_launcher_says_wrong(folder, case):
    code, key, value, fits, words = WRONG[case]
    launcher(folder, code)
    with raises_about(key, value, fits) as caught:
        launch_mode(Launch(mode="mine"))
    assert words in one_line(caught.value)
    assert "RANK" not in os.environ


def test_another_error_names_the_launcher(folder, plait_project):
    launcher(folder, SAYS.replace("True", "env['JOB']"))
    done = plait_project("train", "launch.device=cpu", "launch.mode=mine")
    assert done.code == 1
    assert f"plait: KeyError: 'JOB' (raised by {MINE} in its function 'detect')" in done.err


def test_what_it_does_not_say_is_not_left_of_another(folder):
    launcher(folder, said({name: value for name, value in WHOLE.items() if not name.startswith("LOCAL")}))
    with mock.patch.dict(os.environ, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"):
        assert launch_mode(Launch(mode="mine", nproc_per_node=1)) == "external"
        assert not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & os.environ.keys()


def test_two_that_started_one_process(folder):
    for name in ("mine", "other"):
        launcher(folder, SAYS, name)
    with raises_about("launch.mode", "external", ("mine", "other")):
        launch_mode(Launch(mode="external"))


def test_a_name_that_means_something_else(folder):
    launcher(folder, SAYS, "local")
    assert installed("launcher")["local"].state == "its name means something else: launch.mode=local"


@pytest.mark.slow
def test_ranks_of_a_sweep_but_the_first_leave_its_files_alone(folder, plait_project):
    launcher(folder, said({**WHOLE, "WORLD_SIZE": 1}))  # so that rank 1 is refused when it has done what it does here
    with mock.patch("plait.sweep.command.Command.hold") as taken:
        done = plait_project("train", "-m", "launch.device=cpu", "launch.mode=mine", "train.seed=1,2")
    assert not taken.called
    assert (done.code, "RANK is '1'" in done.err) == (1, True)
    assert not list(folder.rglob("sweep.json"))


MACHINES = "def detect(env): return True\ndef machines(env): return {}\n"
SAID = {"nnodes": "2", "rdzv_endpoint": "127.0.0.1:2000", "nproc_per_node": "4", "index": "1"}


def on_machines(of: dict[str, object]) -> str:
    return MACHINES.replace("{}", repr(of))


TOLD = {  # what the config asks, what the launcher says -> nnodes, endpoint, ranks per machine
    "all": ({}, SAID, (2, "127.0.0.1:2000", 4)),
    "the config's values stay": (
        {"nnodes": "2:3", "rdzv_endpoint": "a:1", "nproc_per_node": 1},
        SAID,
        ("2:3", "a:1", 1),
    ),
    "elastic": ({}, {**SAID, "nnodes": "1:3"}, ("1:3", "127.0.0.1:2000", 4)),
    "it does not know the number": ({"nnodes": 3}, {"rdzv_endpoint": "[::1]:1"}, (3, "[::1]:1", "auto")),
    "one machine": ({}, {"nnodes": 1}, (1, None, "auto")),
}


@pytest.mark.parametrize("case", TOLD)
def test_a_launcher_that_starts_one_process_per_machine(folder, case):
    asked, of, wanted = TOLD[case]
    launcher(folder, on_machines(of))
    lines: list[str] = []
    made = among_machines(Launch(mode="mine", **asked), lines.append)
    assert (made.nnodes, made.rdzv_endpoint, made.nproc_per_node) == wanted
    assert launch_mode(made) == "local"
    assert lines == ([f"launch: mine started this command on each of {wanted[0]} machines"] if wanted[0] != 1 else [])


WRONG_MACHINES = {  # what it says -> the key, the value, words
    "no number": ({"index": 0}, "launch.nnodes", 1, f"{MINE} does not say how many machines there are"),
    "no word": ({"nnodes": "two"}, "launch.mode", "mine", f"it is what {MINE} says"),
    "another key": ({"nnodes": 2, "world": 4}, "launch.mode", "mine", "returned world from its function 'machines'"),
}


@pytest.mark.parametrize("case", WRONG_MACHINES)
def test_what_it_says_wrong_of_machines(folder, case):
    of, key, value, words = WRONG_MACHINES[case]
    launcher(folder, on_machines(of))
    with raises_about(key, value) as caught:
        among_machines(Launch(mode="mine"), print)
    assert words in one_line(caught.value)


def test_auto_asks_where_machines_meet_and_if_several_were_started(folder):
    launcher(folder, on_machines(SAID))
    assert among_machines(Launch(), print).nnodes == 1  # nothing says that there are several
    assert among_machines(Launch(nnodes=2, rdzv_endpoint="a:1"), print).rdzv_endpoint == "a:1"
    assert among_machines(Launch(nnodes=2), print).rdzv_endpoint == "127.0.0.1:2000"
    with mock.patch.dict(os.environ, SKYPILOT_NUM_NODES="2"):
        assert among_machines(Launch(), print).nnodes == 2


def test_the_number_of_a_machine_is_its_rank_in_a_sweep(folder):
    launcher(folder, on_machines(SAID))
    assert rank_here(Launch(mode="mine")) == 1
    launcher(folder, on_machines({**SAID, "nnodes": 1}), "other")
    assert rank_here(Launch(mode="other")) is None


def test_a_pod_has_a_name_for_others_only_when_it_has_started(folder):
    launcher(folder, on_machines({**SAID, "rdzv_endpoint": "pod-0.jobs:29500"}))
    lines: list[str] = []
    found = mock.patch("plait.launch.launched.resolves", side_effect=[False, False, True])
    with found, mock.patch("time.sleep"), mock.patch("plait.launch.launched.PATIENCE", 0):
        among_machines(Launch(mode="mine"), lines.append)
    assert lines[-1] == "launch: waiting for the machine pod-0.jobs, whose name is not known yet"


def test_a_pod_whose_rank_is_its_number_is_no_rank():
    """Of a PyTorchJob: it would be one rank, and its other GPUs idle."""
    pod = {"RANK": "0", "WORLD_SIZE": "16", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "0"}
    meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": "23456"}
    with mock.patch.dict(os.environ, {**pod, **meet}):
        made = among_machines(Launch(), print)
        assert (made.nnodes, made.rdzv_endpoint, made.nproc_per_node) == (2, "localhost:23456", 8)
        assert launch_mode(made) == "local"
    with mock.patch.dict(os.environ, {**pod, **meet, "LOCAL_RANK": "0"}):  # of a torchrun that was started there
        assert launch_mode(among_machines(Launch(), print)) == "external"
