"""Ranks in which a strategy `ghost` is installed, whose code a test gives."""

import textwrap

import pytest

from plait_testing.suite import numerics
from tests.helpers.fakes import distribution, forget
from tests.mutants.planted import Beside


@pytest.fixture
def install_ghost(tmp_path, monkeypatch, plait_ranks):
    """code -> ranks that have it; the suite then trains few steps, of which the first shows what is wrong."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(numerics, "STEPS", numerics.FEW)

    def install(code):
        distribution(tmp_path, "plait-ghost", code=textwrap.dedent(code))
        return Beside(plait_ranks, [str(tmp_path)])

    yield install
    forget(tmp_path)
