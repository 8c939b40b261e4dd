"""A release names the torch that it was tested with, and a run says once if its own is newer."""

import tomllib
from unittest import mock

import pytest
import torch

from plait.check.tested_torch import newer_torch
from plait_testing.project import STARTED
from tests.docs.pages import ROOT

METADATA = tomllib.loads((ROOT / "core/pyproject.toml").read_text())["project"]
(PIN,) = METADATA["optional-dependencies"]["tested"]
TESTED = PIN.removeprefix("torch==")
REQUIRED = ["torch>=2.11", 'wandb; extra == "wandb"', f'{PIN}; extra == "tested"']  # as in a wheel


def test_it_is_the_torch_of_these_tests() -> None:
    assert PIN in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("version", "told"),
    [
        *[(TESTED, False), (f"{TESTED}+cu130", False), ("2.11.0", False), ("2.9.1", False), ("built-here", False)],
        *[(f"{TESTED}.1", True), ("2.14.0a0+git12ab", True), ("2.100.0", True), ("3.0", True)],
    ],
)
def test_only_a_newer_one_is_named(version: str, told: bool) -> None:
    said = newer_torch(version, REQUIRED)
    assert (said is not None) == told
    if said:
        assert version in said
        assert TESTED in said


def test_without_the_metadata_nothing_is_said() -> None:
    assert newer_torch("99.0", ["torch>=2.11", 'torch==2.12; extra == "others"']) is None


def test_a_run_says_it_once(plait_project) -> None:
    for version, count in (("99.0", 1), (TESTED, 0)):
        with mock.patch.object(torch, "__version__", version):
            done = plait_project("train", f"run.name=with-{count}")
        assert (done.code, done.out.count(f"torch {version} is newer than {TESTED}")) == (STARTED, count), done.err
