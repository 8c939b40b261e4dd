"""What a package may add to a run beside its strategy: observers, a sink and a schedule, in real runs."""

import json

import pytest

from plait import PlaitError
from plait.contract.run import Run
from tests.helpers.fakes import distribution, forget

SMALL = ("launch.device=cpu", "model.n_layers=1", "model.dim=32", "train.seq_len=16", "train.local_batch_size=1")
CODE = """
import json
import attrs
import torch
from plait import is_loaded

@attrs.define
class Patient:
    "Stops after the validation of step `at`, and logs what it saw."
    at: int = 4
    applied: object = attrs.field(init=False, default=None)
    seen: int = attrs.field(init=False, default=0)

    def begin(self, applied, optimizer):
        self.applied = applied

    def backward(self, micro):
        self.seen += 1

    def after(self):
        self.applied.run.log("patient/seen", self.seen)
        self.applied.run.log("patient/half", torch.tensor(self.seen / 2))

    def validated(self, step, loss):
        self.applied.run.log("patient/best", loss)
        if step == self.at:
            self.applied.run.stop(f"nothing gained since step {step}")

@attrs.define(slots=False)
class Counts:
    "Counts steps, over restarts."
    steps: object = attrs.field(init=False, factory=lambda: torch.zeros((), dtype=torch.int64))
    def begin(self, applied, optimizer):
        self.run = applied.run
        self.loaded = is_loaded(self.steps)
    def after(self):
        self.steps += 1
        self.run.log("counts/steps", self.steps)
        self.run.log("counts/loaded", int(self.loaded))
    def state(self, applied):
        return {"steps": self.steps}

@attrs.define
class Broken:
    moment: str = "clip"
    def clip(self):
        raise ValueError("too tired")

@attrs.define
class Lines:
    name: str = "lines.txt"
    file: object = attrs.field(init=False, default=None)
    def open(self, folder, config, step):
        self.file = (folder / self.name).open("a")
        print("open", step, config["train"]["steps"], file=self.file)
    def log(self, row):
        print(row["step"], sorted(key for key in row if "/" in key), file=self.file)
    def close(self):
        self.file.close()

@attrs.define
class Stairs:
    height: float = 0.5
    def factor(self, step, steps):
        return self.height ** (step // 2)
"""


OPTIONS = {
    "Patient": "at: 4",
    "Counts": "",
    "Broken": "moment: clip",
    "Lines": "name: lines.txt",
    "Stairs": "height: 0.5",
}


@pytest.fixture
def package(tmp_path_factory, monkeypatch):
    """An installed distribution with two observers, a sink and a schedule."""
    folder = tmp_path_factory.mktemp("package")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    distribution(folder, "plait-extras", code=CODE)
    points = {"observers": ("Patient", "Broken", "Counts"), "sinks": ("Lines",), "schedules": ("Stairs",)}
    conf = {"observers": "observer", "sinks": "sink", "schedules": "schedule"}
    text = ""
    for group, classes in points.items():
        text += f"[plait.{group}]\n" + "".join(f"{name.lower()} = plait_extras:{name}\n" for name in classes)
        where = folder / "plait_extras" / "conf" / conf[group]
        where.mkdir()
        node = "schedule.shape" if group == "schedules" else conf[group]
        for name in classes:
            (where / f"{name.lower()}.yaml").write_text(f"# @package {node}.{name.lower()}\n{OPTIONS[name]}\n")
    (folder / "plait_extras-1.0.dist-info" / "entry_points.txt").write_text(text)
    yield folder
    forget(folder)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


RUN = (
    *("train", "run.name=r", *SMALL, "train.steps=8", "validation.interval=2", "checkpoint.interval=100"),
    *("observer=[patient]", "sink=[lines]", "schedule=stairs", "schedule.shape.stairs.height=0.25"),
    *("metrics.tensorboard=false", "optimizer.lr=0.01", "launch.nproc_per_node=2", "strategy=[fsdp2]"),
)


def test_a_run_that_ends_itself_and_what_it_logged(package, plait_project):
    done = plait_project(*RUN, ranks=2)
    assert (done.code, done.err) == (0, "")
    assert "trained to step 5, where it ended early: nothing gained since step 4: loss " in done.out
    folder = plait_project.path / "runs" / "r"
    got = rows(folder)
    assert [row["step"] for row in got] == [1, 2, 3, 4, 5]
    assert [row["lr"] for row in got] == [0.01, 0.01, 0.0025, 0.0025, 0.000625]
    assert [row["patient/seen"] for row in got] == [1, 2, 3, 4, 5]
    assert [row["patient/half"] for row in got] == [0.5, 1.0, 1.5, 2.0, 2.5]
    assert [row["step"] for row in got if "patient/best" in row] == [2, 4]
    assert all(row["patient/best"] == row["val_loss"] for row in got if "patient/best" in row)
    lines = (folder / "lines.txt").read_text().splitlines()
    assert lines[0] == "open 0 8"
    assert lines[2] == "2 ['patient/best', 'patient/half', 'patient/seen']"
    assert len(lines) == 6
    again = plait_project(*RUN)
    assert (again.code, again.out.splitlines()[-1]) == (
        0,
        "r is finished at step 5: raise train.steps, or set another run.name",
    )
    more = plait_project(*RUN, "train.steps=9", "observer.patient.at=100", ranks=2)
    assert (more.code, rows(folder)[-1]["step"]) == (0, 9)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "observer=[pateint]",
            "patient; did you mean 'patient'?",
        ),
        ("observer.patient.att=3", "observer.patient.att"),
        ("observer.patient.at=x", "observer.patient.at"),
        ("schedule.shape.stairs.height=-1", "schedule 'stairs' (plait-extras 1.0) returned -1.0 for step 7 of 8"),
        ("sink.lines.name=3", "sink.lines.name"),
    ],
)
def test_what_is_refused_before_a_rank_starts(package, plait_project, override, sentence):
    done = plait_project(*RUN, override)
    assert done.code == 1
    assert sentence in done.err
    assert not (plait_project.path / "runs").exists()


@pytest.mark.slow
def test_what_an_observer_keeps_is_resumed(package, plait_project):
    """By two ranks and then one; first without it, last without it."""
    path = plait_project.path / "runs" / "r"
    done = plait_project(*RUN, "observer=[]", "train.steps=2", ranks=2)
    assert (done.code, done.err) == (0, "")
    for steps, ranks, seen, loaded in ((4, 2, [1, 2], 0), (6, 1, [3, 4], 1)):
        done = plait_project(
            *RUN, "observer=[counts]", f"train.steps={steps}", f"launch.nproc_per_node={ranks}", ranks=ranks
        )
        assert (done.code, done.err) == (0, "")
        assert ("observer 'counts' has no state in the checkpoint: it starts anew" in done.out) == (not loaded)
        assert [row["counts/steps"] for row in rows(path)[-2:]] == seen
        assert [row["counts/loaded"] for row in rows(path)[-2:]] == [loaded] * 2
    done = plait_project(*RUN, "observer=[]", "train.steps=8", ranks=2)
    assert (done.code, done.err, "anew" in done.out) == (0, "", False)


def test_an_observer_that_fails_is_named(package, plait_project):
    done = plait_project(*RUN, "observer=[broken]", ranks=2)
    assert done.code == 1
    assert "raised by observer 'broken' (plait-extras 1.0) in its moment 'clip'" in done.err


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("seen", 1, "is logged as '<who>/<what>'"),
        ("me/ spaced", 1, "is logged as '<who>/<what>'"),
        ("me/text", "much", "is no number"),
        ("me/none", None, "is no number"),
    ],
)
def test_what_cannot_be_logged(name, value, why):
    from plait.contract.config import Config
    from plait.contract.model_spec import ModelSpec

    with pytest.raises(PlaitError, match=why):
        Run(Config(), 1, "cpu", ModelSpec({}), 0).log(name, value)
