"""Machines that differ, or do not share their folders, end with one sentence on each before the first step."""

import re

import pytest

from tests.helpers.commands import SMALL

pytestmark = pytest.mark.slow  # tests/launch/test_alike.py has the same with ranks of one machine

TOGETHER = ["launch.nnodes=2", "launch.nproc_per_node=1", "launch.rdzv_endpoint=alpha:29500"]
FSDP = ["strategy=[fsdp2]", "train.steps=10", "run.name=a", *TOGETHER]


def refused(runs, sentence):
    for run in runs:
        assert run.code() == 1, run.output
        said = [line for _, line in run.lines if line.startswith("plait: ")]
        assert len(said) == 1, run.output
        assert re.fullmatch(f"plait: {sentence}", said[0]), said[0]


def test_another_command_on_one_machine_is_refused(machines, tmp_path):
    given = {"alpha": [], "beta": ["optimizer.lr=3e-2"]}
    runs = [machines[name].plait("train", *SMALL, *FSDP, *more, cwd=tmp_path) for name, more in given.items()]
    refused(runs, r"the machines of a run must be alike: optimizer\.lr=.* on \w+, .* on \w+: .*same command")
    assert not (tmp_path / "runs" / "a" / "config.yaml").exists()


def test_other_data_on_one_machine_is_refused(machines, tmp_path):
    for machine in machines:
        (tmp_path / machine.name).mkdir()
        (tmp_path / machine.name / "text.txt").write_text(f"A text of {machine.name}.\n" * 500)
    given = [*SMALL, *FSDP, "data=text", "data.path=text.txt"]
    runs = []
    for machine in machines:
        runs.append(machine.plait("train", *given, cwd=tmp_path / machine.name))
    refused(runs, r"the machines of a run must be alike: the data or its tokenizer on \w+ is not that on \w+: .*")


def test_folders_that_are_not_shared_are_refused(machines, tmp_path):
    """/tmp is each machine's own."""
    for machine in machines:
        machine.run("mkdir", "-p", "/run/own")
    runs = [machine.plait("train", *SMALL, *FSDP, cwd="/run/own") for machine in machines]
    refused(runs, r"/run/own/runs/a on \w+ is not the folder that \w+ sees: .* need a shared folder .*")
    for machine in machines:
        assert "config.yaml" not in machine.run("find", "/run/own")
