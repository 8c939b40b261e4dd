"""Launchers of other packages: how a run chooses one, what it may say, and that its ranks train as torchrun's do."""

import os
import sys
from pathlib import Path
from unittest import mock

import pytest

from plait.contract.config import Launch
from plait.contract.errors import PlaitError
from plait.launch.launcher import launch_mode
from plait.strategies.registry import installed
from plait.system.errors import one_line
from plait.testing import raises_about
from tests.docs.pages import ROOT, blocks
from tests.helpers.commands import free_port, numbers, start
from tests.helpers.fakes import distribution, forget

EXAMPLE = next(b.text for b in blocks(ROOT / "docs/kinds.md") if str(b.file).endswith("openmpi.py"))
ENDS = {"RANK": "RANK", "SIZE": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
OF_RANKS = (*ENDS.values(), "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
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
def test_two_processes_of_open_mpi_train_as_those_of_torchrun(folder):
    """Bitwise. They are started here one by one, as mpirun would."""
    launcher(folder, EXAMPLE, "openmpi")
    runs = []
    for name, mode in {"mpi": "openmpi", "torchrun": "auto"}.items():
        meet = {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(folder)}
        for rank in ("0", "1"):
            env = {"RANK": rank, "SIZE": "2", "LOCAL_RANK": rank, "LOCAL_SIZE": "2"}
            if name == "mpi":
                told = {f"OMPI_COMM_WORLD_{end}": value for end, value in env.items()}
            else:
                told = {ENDS[end]: value for end, value in env.items()} | {"MASTER_ADDR": "localhost"}
            options = (*FSDP, f"launch.mode={mode}", f"run.name={name}")
            runs.append(start(*options, cwd=folder, **meet, **told))
    texts = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * 4, texts
    assert [text.count("launch: external, 2 rank(s)") for text in texts] == [1, 0, 1, 0]
    assert len(numbers(folder / "runs/mpi")) == 4
    assert numbers(folder / "runs/mpi") == numbers(folder / "runs/torchrun")


def test_the_example_says_what_torchrun_would(folder):
    launcher(folder, EXAMPLE, "openmpi")
    for mode in ("auto", "external", "openmpi"):
        with mock.patch.dict(os.environ, MPI, MASTER_PORT="2000"):
            assert launch_mode(Launch(mode=mode)) == "external"
            assert {name: os.environ[name] for name in WHOLE} == {k: str(v) for k, v in WHOLE.items()} | {
                "MASTER_PORT": "2000"
            }
    apart = {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with mock.patch.dict(os.environ, apart), raises_about("MASTER_ADDR"):
        launch_mode(Launch())
    with raises_about("launch.mode", "openmpi", ("local",)):
        launch_mode(Launch(mode="openmpi"))


def test_no_launcher_is_imported_that_need_not_be_asked(folder):
    launcher(folder, BROKEN)
    launcher(folder, said(WHOLE), "other")
    several = {"PMI_SIZE": "2"}
    with mock.patch.dict(os.environ):
        assert launch_mode(Launch()) == "local"
        os.environ |= several
        assert launch_mode(Launch(mode="local")) == "local"
        assert launch_mode(Launch(nnodes=2)) == "local"
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
    "no function": ("def detect(env): return True", "launch.mode", "mine", "with detect, variables", MINE),
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
