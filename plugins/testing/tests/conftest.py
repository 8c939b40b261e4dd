"""Ranks in which a strategy `ghost` is installed, whose code a test gives."""

import textwrap

import pytest

from tests.helpers.fakes import distribution, forget
from tests.mutants.planted import ROOT, Planted


@pytest.fixture
def install_ghost(tmp_path, monkeypatch, plait_ranks):
    """code -> ranks that have it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(code):
        distribution(tmp_path, "plait-ghost", code=textwrap.dedent(code))
        return Planted(plait_ranks, [str(ROOT / "core"), str(tmp_path)])

    yield install
    forget(tmp_path)
