"""The allocator of a GPU grows its segments, unless the user configures it; tests/gpu sees it do so."""

import os

import pytest

from plait.parallel.process_group import grow_segments

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.fixture
def environment(monkeypatch):
    kept = {k: v for k, v in os.environ.items() if k not in NAMES}
    monkeypatch.setattr(os, "environ", kept)
    return kept


def test_it_grows_unless_it_is_configured(environment):
    grow_segments()
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_says_holds(environment, name):
    environment[name] = "max_split_size_mb:64"
    grow_segments()
    assert {n: environment.get(n) for n in NAMES} == {n: environment[name] if n == name else None for n in NAMES}
